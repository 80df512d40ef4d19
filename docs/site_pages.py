"""Makes the site of the pages as they are in the repository, with the README as the first one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the README as the first page."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(
        File.generated(config, "index.md", content=_LINK.sub(_from_the_root, readme).replace('src="docs/', 'src="'))
    )
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Has links out of `docs` lead to the first page, or nowhere: the site has no copy of the code."""
    return markdown if page.file.src_uri == "index.md" else _LINK.sub(_out_of_the_docs, markdown)


def _from_the_root(link: re.Match[str]) -> str:
    text, target = link.groups()
    if "://" in target or target.startswith("#"):
        return link.group()
    return f"[{text}]({target.removeprefix('docs/')})" if target.startswith("docs/") else text


def _out_of_the_docs(link: re.Match[str]) -> str:
    text, target = link.groups()
    if target == "../README.md":
        return f"[{text}](index.md)"
    return text if target.startswith("../") else link.group()
