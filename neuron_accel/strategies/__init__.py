"""What to do: one package for each strategy."""
