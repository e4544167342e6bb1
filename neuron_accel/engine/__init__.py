"""Who decides: the plan, what a tensor is on each rank, the state of a run, and the mathematics of optimizers."""
