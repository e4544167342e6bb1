"""How the site is built: ``nox -s docs``."""

project = "neuron_accel"
author = "The neuron_accel developers"
copyright = "The neuron_accel developers, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
myst_heading_anchors = 3
# Links to files outside the site, which are there in the repository.
suppress_warnings = ["myst.xref_missing", "myst.header"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "neuron_accel"
