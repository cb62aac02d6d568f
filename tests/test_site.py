"""The site: it builds without a warning, which is where links and anchors are checked,
and it needs no other host."""

import re

import pytest
from pages import ROOT
from processes import python

import featcache

pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    config = ROOT / "docs" / "mkdocs.yml"
    python(
        "-m", "mkdocs", "build", "--config-file", config, "--strict", "--site-dir", folder
    ).with_code(0)
    return folder


def test_every_page_is_in_the_site_and_loads_nothing_from_other_hosts(site):
    assert not re.search(
        r"url\(.?(https?:)?//", "".join(path.read_text() for path in site.rglob("*.css"))
    )
    for page in sorted((ROOT / "docs").glob("*.md")):
        html = (site / "docs" / page.stem / "index.html").read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", html)
        assert [tag for tag in loaded if re.search(r"(src|href)=[\"']?(https?:)?//", tag)] == []
        prose = re.sub(r"<pre.*?</pre>", "", html, flags=re.DOTALL)
        assert not re.search(r"<p>[^<]*\n([*-]|\d\.) |\n\||```|:::", prose), (
            f"{page.name}: Markdown is left as it is"
        )


def test_the_reference_has_every_public_name(site):
    reference = (site / "docs" / "api" / "index.html").read_text(encoding="utf-8")
    shown = set(re.findall(r'id="featcache\.(?:errors\.)?(\w+)"', reference))
    # modules, of which it shows what they hold
    assert {*featcache.__all__} - shown == {"adapters", "cmvn"}
