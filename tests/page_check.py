"""Reads a page of ours as HTML: every tag closed in order, and what the tests ask of it."""

from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "input", "hr"}


class Page(HTMLParser):
    """Checks that every tag is closed in order and collects what the tests ask for."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes nothing"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def values(self, tag: str, name: str) -> list[str]:
        return [attrs.get(name) or "" for each, attrs in self.tags if each == tag]
