"""Language models: the score contract, n-gram models and recurrent networks."""
