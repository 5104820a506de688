"""Sphinx's settings. ``python -m sphinx -W --keep-going -b html docs build/docs`` builds the site from these pages.

The pages are Markdown that a forge shows as well: links go to files, and to sections by the names that GitHub gives
them. With ``-W`` a link to a missing page, file or section fails the build.

The site needs no other server. Its diagrams are drawn by the browser, with the copy of Mermaid that the package
mermaidx contains. Only that file of the package is used.
"""

import hashlib
import html
import importlib.metadata
import re
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

import sparklog

project = "sparklog"
version = release = sparklog.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
highlight_language = "none"

# Names are shown without their modules: users import all of them from ``sparklog``.
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100

# ``-b linkcheck`` requests each address of another site.
linkcheck_timeout = 30
linkcheck_retries = 3
# GitHub shows its anchors by a script, so the page does not contain them.
linkcheck_anchors_ignore_for_url = [r"https://github\.com/"]

html_theme = "furo"
html_title = f"sparklog {release}"
html_static_path = ["_static"]
html_css_files = ["sparklog.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False


# Pages of the site whose text is a file of the project's root, where a forge expects it.
ROOT = Path(__file__).resolve().parent.parent
ROOT_FILES = {"index": "README.md", "changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md"}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|[#/])[^)#\s]+")


def put_root_file(app, page, source):
    """Replace what a page says before its first list of pages by the root's file, and mend links to and from there."""
    up = "../" * (page.count("/") + 1)
    pages = {up + file: f"/{name}.md" for name, file in ROOT_FILES.items()}
    if page in ROOT_FILES:
        app.env.note_dependency(str(ROOT / ROOT_FILES[page]))
        text = LINK.sub(lambda link: _from_docs(link[0]), (ROOT / ROOT_FILES[page]).read_text("utf-8"))
        _, fence, lists = source[0].partition("```{toctree}")
        source[0] = f"{text}\n{fence}{lists}"
    source[0] = LINK.sub(lambda link: pages.get(link[0], link[0]), source[0])


def _from_docs(target):
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"


#: The script of Mermaid 11.16.0, as its authors have released it. Another copy fails the build.
MERMAID_SHA256 = "74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b"


class Mermaid(Directive):
    """A diagram, whose text ``_static/diagrams.js`` replaces by a picture."""

    has_content = True

    def run(self):
        text = html.escape("\n".join(self.content))
        return [nodes.raw("", f'<pre class="mermaid">{text}</pre>', format="html")]


def add_mermaid(app):
    """Copy Mermaid's script to the site."""
    if app.builder.format != "html":
        return
    script = next(file for file in importlib.metadata.files("mermaidx") if file.name == "mermaid.js").read_binary()
    if (found := hashlib.sha256(script).hexdigest()) != MERMAID_SHA256:
        raise ValueError(f"mermaidx has a mermaid.js with SHA-256 {found}, {MERMAID_SHA256} expected")
    static = Path(app.outdir) / "_static"
    static.mkdir(parents=True, exist_ok=True)
    (static / "mermaid.js").write_bytes(script)


def add_diagram_scripts(app, page, template, context, doctree):
    """Add the scripts that draw diagrams to the pages with diagrams.

    They are no modules, because browsers load modules only from a server, and these pages may be files.
    """
    if doctree and any('class="mermaid"' in raw.astext() for raw in doctree.findall(nodes.raw)):
        app.add_js_file("mermaid.js", loading_method="defer")
        app.add_js_file("diagrams.js", loading_method="defer")


def setup(app):
    app.add_directive("mermaid", Mermaid)
    app.connect("builder-inited", add_mermaid)
    app.connect("html-page-context", add_diagram_scripts)
    app.connect("source-read", put_root_file)
