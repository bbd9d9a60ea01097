"""Language models: the interface, n-gram models, recurrent networks and combinations."""
