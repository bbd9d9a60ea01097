"""Other people's programs that the benchmarks run beside this one."""
