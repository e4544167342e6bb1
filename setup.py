"""The package is described in setup.cfg; this file is for tools that ask for it."""

from setuptools import setup

setup()
