"""Label files that tests write by hand: TextGrids of both formats, CTM and RTTM."""

from collections.abc import Iterable, Mapping, Sequence

Labels = Sequence[tuple[float, float, str]]


def quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def long_textgrid(end: float, tiers: Mapping[str, Labels], points: Iterable[str] = ()) -> str:
    """A TextGrid as Praat saves it; `points` are the names of tiers of points."""
    lines = ['File type = "ooTextFile"', 'Object class = "TextGrid"', "", "xmin = 0 "]
    lines += [f"xmax = {end} ", "tiers? <exists> ", f"size = {len(tiers)} ", "item []: "]
    for number, (name, labels) in enumerate(tiers.items(), 1):
        is_points = name in points
        kind, item = ("TextTier", "points") if is_points else ("IntervalTier", "intervals")
        lines += [f"    item [{number}]:", f'        class = "{kind}" ']
        lines += [f"        name = {quoted(name)} ", "        xmin = 0 ", f"        xmax = {end} "]
        lines.append(f"        {item}: size = {len(labels)} ")
        for at, (first, last, label) in enumerate(labels, 1):
            lines.append(f"        {item} [{at}]:")
            if is_points:
                lines += [f"            number = {first} ", f"            mark = {quoted(label)} "]
            else:
                lines += [f"            xmin = {first} ", f"            xmax = {last} "]
                lines.append(f"            text = {quoted(label)} ")
    return "\n".join(lines) + "\n"


def short_textgrid(end: float, tiers: Mapping[str, Labels], points: Iterable[str] = ()) -> str:
    """The same as Praat's "short text file"."""
    lines = ['File type = "ooTextFile"', 'Object class = "TextGrid"', "", "0", f"{end}"]
    lines += ["<exists>", f"{len(tiers)}"]
    for name, labels in tiers.items():
        kind = "TextTier" if name in points else "IntervalTier"
        lines += [f'"{kind}"', quoted(name), "0", f"{end}", f"{len(labels)}"]
        for first, last, label in labels:
            lines += [f"{first}"] if name in points else [f"{first}", f"{last}"]
            lines.append(quoted(label))
    return "\n".join(lines) + "\n"


def ctm_of(recording: str, labels: Labels, channel: str = "1") -> str:
    return "".join(
        f"{recording} {channel} {first} {last - first} {label} 0.98\n"
        for first, last, label in labels
    )
