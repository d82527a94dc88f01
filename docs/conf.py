"""The documents as a site: ``pip install -e '.[docs]' && sphinx-build -W docs site``."""

from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

project = "Vision Longhorn"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autoclass_content = "both"  # arguments are in the docstring of __init__
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
default_role = "code"
nitpick_ignore_regex = [("py:.*", ".*")]  # types of torch, timm and Python, whose indices need a network
myst_heading_anchors = 3
html_theme = "furo"
html_title = project
html_copy_source = False


def _without_links(app: Sphinx, document: nodes.document) -> None:
    """Leave the text alone of links to files of the repository that the site does not have."""
    docs = Path(app.srcdir)
    for link in list(document.findall(pending_xref)):
        target = link["reftarget"].partition("#")[0]
        paths = (docs.parent / target, docs / target, docs / f"{target}.md")
        found = [path.resolve() for path in paths if target and path.is_file()]
        if found and not found[0].is_relative_to(docs):
            link.replace_self(link.children)


def setup(app: Sphinx) -> None:
    """Connect what this adds to Sphinx."""
    app.connect("doctree-read", _without_links)
