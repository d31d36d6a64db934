"""The page that `inspect`, runs and the demo write."""

from vitfast.eval.inspect.page import gallery, page, picture, table


def test_page_holds_all_it_is_given_in_order_and_escapes_it():
    sections = {"One & two": ("a < b", picture(b"png", 'a "picture"')), "Bare": ("", "")}
    text = page("<title>", {"k<": "v&"}, sections, "in the beginning")
    wanted = [
        "<title>&lt;title&gt;</title>",
        "<h1>&lt;title&gt;</h1>",
        '<p class="small">in the beginning</p>',
        "<td>k&lt;</td><td class=n>v&amp;</td>",
        "<h2>One &amp; two</h2>",
        '<p class="small">a &lt; b</p>',
        '<img alt="a &quot;picture&quot;" src="data:image/png;base64,cG5n">',
        "<h2>Bare</h2>",
        "</html>",
    ]
    places = [text.index(piece) for piece in wanted]
    assert places == sorted(places) and text.count("<p ") == 2
    assert "<p" not in page("t", {}, {"Heading": ("", "")})


def test_galleries_and_tables_escape_what_they_are_given():
    text = gallery([(picture(b"png", "a"), "<i>"), (picture(b"png", "b"), "b & c")])
    assert "<figcaption>&lt;i&gt;</figcaption>" in text and "<figcaption>b &amp; c</figcaption>" in text
    assert text.count("<figure><img ") == 2
    assert table({"<k>": "1 < 2"}) == "<table><tr><td>&lt;k&gt;</td><td class=n>1 &lt; 2</td></tr></table>"
