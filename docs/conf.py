"""How the site is built: ``nox -s docs``."""

import ast
import enum
import inspect

from sphinx.errors import ExtensionError

from neuron_accel import contract

project = "neuron_accel"
author = "The neuron_accel developers"
copyright = "The neuron_accel developers, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
# In the signature only: docstrings describe the parameters already, and a second list would repeat them.
autodoc_typehints = "signature"
maximum_signature_line_length = 110
myst_heading_anchors = 3
# Links to files outside the site, which are there in the repository.
suppress_warnings = ["myst.xref_missing", "myst.header"]
exclude_patterns = ["_build", "figures"]
html_theme = "furo"
html_title = "neuron_accel"

CONTRACT = {
    "Plugins and the plan": ("engine.plan",),
    "The run": ("engine.runtime",),
    "Layouts and parameters": ("engine.sharding",),
    "Gradients": ("engine.optim.buckets", "engine.optim.norms", "engine.optim.reducer"),
    "Optimizers": ("engine.optim",),
    "Backends and collectives": ("backends",),
    "Errors": ("errors",),
}
"""Sections of the page about the contract, by the modules that their names come from."""


def setup(app):
    app.connect("source-read", write_contract)


def write_contract(app, docname, source):
    """Appends every name of ``neuron_accel.contract`` to its page, in sections."""
    if docname != "contract":
        return
    sections = {title: [] for title in CONTRACT}
    origins = imported_from(contract)
    for name in contract.__all__:
        sections[section_of(name, origins[name])].append(name)
    for title, names in sections.items():
        entries = "\n".join(directive(name) for name in names)
        source[0] += f"\n## {title}\n\n```{{eval-rst}}\n{entries}\n```\n"


def imported_from(module):
    """The module that each imported name of ``module`` comes from: constants and aliases do not know it themselves."""
    nodes = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: node.module.removeprefix("neuron_accel.")
        for node in nodes
        if node.module.startswith("neuron_accel.")
        for alias in node.names
    }


def section_of(name, module):
    for title, prefixes in CONTRACT.items():
        if module.startswith(prefixes):
            return title
    raise ExtensionError(f"neuron_accel.contract.{name} of {module} has no section: see CONTRACT in conf.py")


def directive(name):
    value = getattr(contract, name)
    path = f"neuron_accel.contract.{name}"
    if not inspect.isclass(value):
        return f".. {'autofunction' if inspect.isfunction(value) else 'autodata'}:: {path}"
    if issubclass(value, BaseException):
        return f".. autoexception:: {path}"
    undocumented = "\n   :undoc-members:" if issubclass(value, enum.Enum) else ""
    return f".. autoclass:: {path}\n   :members:{undocumented}"
