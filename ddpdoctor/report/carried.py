"""The diagnosis that an HTML report carries, as JSON."""

from __future__ import annotations

from html.parser import HTMLParser

from ddpdoctor.errors import UnusableInput
from ddpdoctor.report.read import GENERATOR, SCRIPT_ID


class _Carrier(HTMLParser):
    """Finds the JSON, and whether the file that ought to hold it is one of ours."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.is_report = False
        self.is_whole = False
        self.pieces: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "meta" and given.get("name") == "generator":
            self.is_report = (given.get("content") or "").split(" ")[0] == GENERATOR
        self._inside = tag == "script" and given.get("id") == SCRIPT_ID

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.pieces.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "script" and self._inside:
            self.is_whole, self._inside = True, False


def carried_in(data: bytes, name: str) -> bytes:
    """The JSON in the page ``data``, the content of ``name``. Raises UnusableInput where there is none."""
    parser = _Carrier()
    parser.feed(data.decode("utf-8", "replace"))
    parser.close()
    if parser.is_whole:
        return "".join(parser.pieces).strip().encode()
    if parser.is_report or parser.pieces:
        raise UnusableInput(f"{name}: the report is cut off half way; write or copy it again")
    raise UnusableInput(f"{name}: an HTML page, but not a ddpdoctor report (it carries no diagnosis)")
