"""Layouts: how the parameters of the original model are sharded on this rank."""
