"""The engine: the plan, the sharding of tensors, the state of a run, and what optimizers and reducers share."""
