# SPDX-License-Identifier: Apache-2.0
"""What commands of other distributions may use: their parser, text for a terminal, pages for a browser, and training
scripts that run in this process. Imports no torch."""

from neuron_accel.cli.main import main
from neuron_accel.cli.parser import Parser, naming_options
from neuron_accel.launch._rank import run_module, run_script
from neuron_accel.terminal import fit, format_table, show, table_width, terminal_width, wrap_words
from neuron_accel.web_page import COLOURS, colour, document, format_bytes, format_seconds, pairs, table

__all__ = [
    "COLOURS",
    "Parser",
    "colour",
    "document",
    "fit",
    "format_bytes",
    "format_seconds",
    "format_table",
    "main",
    "naming_options",
    "pairs",
    "run_module",
    "run_script",
    "show",
    "table",
    "table_width",
    "terminal_width",
    "wrap_words",
]
