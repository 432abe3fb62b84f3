"""What a study says: lines alone in a pipe, a table below them in a terminal."""
import io

from cuflash.model.board import Board


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_pipe_gets_lines_alone():
    out = io.StringIO()
    board = Board(out)
    board.live(["a", "b"])
    board.say("one")
    board.close()
    assert out.getvalue() == "one\n"


def screen(text):
    """What a terminal shows that knows line feeds, cursor up and erase below."""
    lines, at = [""], 0
    for part in text.split("\x1b["):
        if part[1:2] == "A":
            at -= int(part[0])
        if part.startswith("J"):
            del lines[at + 1:]
            lines[at] = ""
            part = part[1:]
        elif part[1:2] == "A":
            continue
        for character in part:
            if character == "\n":
                at += 1
                lines += [""] * (at + 1 - len(lines))
            else:
                lines[at] += character
    return lines


def test_a_terminal_has_the_table_below_the_lines():
    out = Terminal()
    board = Board(out)
    board.live(["a", "b"])
    board.say("one")
    board.live(["c"])
    assert screen(out.getvalue()) == ["one", "c", ""]
    board.close()
    assert screen(out.getvalue()) == ["one", ""]


def test_long_lines_are_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    out = Terminal()
    Board(out).live(["x" * 50])
    assert out.getvalue() == "x" * 19 + "\n"
