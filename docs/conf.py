"""How the site is built: ``nox -s docs``."""

import argparse
import ast
import enum
import inspect
import os
import re
import sys
from pathlib import Path

from sphinx.addnodes import pending_xref
from sphinx.errors import ExtensionError

from neuron_accel import __version__, contract, errors
from neuron_accel.cli.main import build_parser

sys.path.insert(0, str(Path(__file__).parent))
from messages import messages, rows

project = "neuron_accel"
author = "The neuron_accel developers"
release = __version__
copyright = "The neuron_accel developers, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
autodoc_member_order = "bysource"
# In the signature only: docstrings describe the parameters already, and a second list would repeat them.
autodoc_typehints = "signature"
maximum_signature_line_length = 110
myst_heading_anchors = 3
smartquotes = False  # messages and options stand as they are printed, to be searched for
# Links to files outside the site, which are there in the repository.
suppress_warnings = ["myst.xref_missing", "myst.header"]
exclude_patterns = ["_build", "figures", "static"]
html_theme = "furo"
html_title = f"neuron_accel {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "static" / "search_scorer.js")

CONTRACT = {
    "Plugins and the plan": ("engine.plan",),
    "The run": ("engine.runtime",),
    "Layouts and parameters": ("engine.sharding",),
    "Gradients": ("engine.optim.buckets", "engine.optim.norms", "engine.optim.reducer"),
    "Optimizers": ("engine.optim",),
    "Optimizer state and weights that are sharded": ("engine.shards",),
    "Families of models": ("models", "lazy"),
    "Backends and collectives": ("backends",),
}
"""Sections of the page about the contract, by the modules that their names come from."""


def setup(app):
    app.connect("source-read", write_contract)
    app.connect("source-read", write_errors)
    app.connect("source-read", write_commands)
    app.connect("doctree-read", link_packages)


def write_contract(app, docname, source):
    """Appends every name of ``neuron_accel.contract`` and its modules to its page, in sections."""
    if docname != "contract":
        return
    sections = {title: [] for title in CONTRACT}
    for module in (contract, contract.events, contract.families, contract.sharded):
        origins = imported_from(module)
        for name in module.__all__:
            sections[section_of(name, origins[name])].append(directive(module, name))
    for title, directives in sections.items():
        entries = "\n".join(directives)
        source[0] += f"\n## {title}\n\n```{{eval-rst}}\n{entries}\n```\n"


def write_errors(app, docname, source):
    """Appends every class of ``neuron_accel.errors`` to its page, with the messages that the source spells out."""
    if docname == "errors":
        classes = [value for value in vars(errors).values() if inspect.isclass(value)]
        found = messages()
        for name in (cls.__name__ for cls in classes if cls.__module__ == errors.__name__):
            entry = f"```{{eval-rst}}\n.. autoexception:: neuron_accel.errors.{name}\n```"
            source[0] += f"\n## {name}\n\n{entry}\n\n{rows(name, found)}\n"


def write_commands(app, docname, source):
    """Appends the help of every command to its page."""
    if docname == "cli":
        os.environ["COLUMNS"] = "100"
        parser = build_parser()
        (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        texts = {"neuron-accel": parser, **commands.choices}
        for name, command in texts.items():
            if name != "neuron-accel":
                command.load()
            source[0] += f"\n## {name}\n\n```text\n{command.format_help()}\n```\n"


def link_packages(app, doctree):
    """READMEs of packages link to each other as files; in the site they are pages."""
    for node in [*doctree.findall(pending_xref)]:
        match = re.fullmatch(r"(?:\.\./)+(neuron-accel-[\w-]+)/README\.md", node.get("reftarget", ""))
        if match:
            to = {"refdomain": "std", "reftype": "doc", "reftarget": f"/packages/{match[1]}", "refexplicit": True}
            node.replace_self(pending_xref("", *node.children, refdoc=app.env.docname, refwarn=True, **to))


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


def directive(module, name):
    value = getattr(module, name)
    path = f"{module.__name__}.{name}"
    if not inspect.isclass(value):
        return f".. {'autofunction' if inspect.isfunction(value) else 'autodata'}:: {path}"
    undocumented = "\n   :undoc-members:" if issubclass(value, enum.Enum) else ""
    return f".. autoclass:: {path}\n   :members:{undocumented}"
