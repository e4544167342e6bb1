"""The package is described in setup.cfg; its description is the README without what a package index cannot show."""

import re
from pathlib import Path

from setuptools import setup

README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")


def without_relative_links(text: str) -> str:
    """Links and pictures of the repository lead nowhere on the page of a package index: of a link its text stays."""
    text = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n?", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(long_description=without_relative_links(README), long_description_content_type="text/markdown")
