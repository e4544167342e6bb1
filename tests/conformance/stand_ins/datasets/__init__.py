"""In place of the package of that name where it is not installed. Upstream's scripts import it at the top, silence it,
and load data only in parts that need a hub and an accelerator."""

from types import SimpleNamespace


def load_dataset(*_, **__):
    raise RuntimeError("the package 'datasets' is not installed; this part of the script needs it")


utils = SimpleNamespace(logging=SimpleNamespace(set_verbosity_warning=lambda: None, set_verbosity_error=lambda: None))
