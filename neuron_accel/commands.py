# SPDX-License-Identifier: Apache-2.0
"""What commands of other distributions may use: their parser, text for a terminal, pages for a browser, training
scripts that run in this process, configurations and plans of runs, facts about Trainium and checks of the network.
Imports no torch."""

from neuron_accel.cli.main import main
from neuron_accel.cli.parser import Parser, naming_options
from neuron_accel.engine.plan.coerce import load_dataclass
from neuron_accel.engine.plan.config import load_config, to_config
from neuron_accel.engine.plan.ranks import dry_plan
from neuron_accel.engine.plan.registry import plugin_classes
from neuron_accel.launch._rank import run_module, run_script
from neuron_accel.launch.network import collect_network
from neuron_accel.neuron.facts import FACTS
from neuron_accel.terminal import fit, format_table, show, table_width, terminal_width, wrap_words
from neuron_accel.web_page import COLOURS, colour, document, format_bytes, format_seconds, pairs, table

__all__ = [
    "COLOURS",
    "FACTS",
    "Parser",
    "collect_network",
    "colour",
    "document",
    "dry_plan",
    "fit",
    "format_bytes",
    "format_seconds",
    "format_table",
    "load_config",
    "load_dataclass",
    "main",
    "naming_options",
    "pairs",
    "plugin_classes",
    "run_module",
    "run_script",
    "show",
    "table",
    "table_width",
    "terminal_width",
    "to_config",
    "wrap_words",
]
