"""What benchmarks and checks are made of: workloads, tables, peers. The commands are one folder up."""
