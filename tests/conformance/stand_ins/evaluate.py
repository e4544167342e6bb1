"""In place of the package of that name where it is not installed. Upstream's scripts import it at the top, and use it
only for parts that need a hub and an accelerator."""
