#!/usr/bin/env bash
# praatio reads a TextGrid's times without their sign, and its last label only with a line
# break behind it.
#
# Praat writes TextGrids that begin before 0, after "Shift times to", and reads files whose
# last line has no line break. praatio 6.2.2 gives -0.5 as 0.5 in the long format, so two
# intervals overlap, and of a short file without a last line break it gives one interval
# less. It reports neither.
#
# Seen:
#    long format, times -0.5, 0.25, 1.0: intervals [(0.5, 0.25, 'one'), (0.25, 1.0, 'two')]
#    short format: 2 with a last line break, 1 without
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/try.py" <<'PYTHON'
from praatio.utilities.textgrid_io import parseTextgridStr

LONG = '''File type = "ooTextFile"
Object class = "TextGrid"

xmin = -0.5
xmax = 1.0
tiers? <exists>
size = 1
item []:
    item [1]:
        class = "IntervalTier"
        name = "words"
        xmin = -0.5
        xmax = 1.0
        intervals: size = 2
        intervals [1]:
            xmin = -0.5
            xmax = 0.25
            text = "one"
        intervals [2]:
            xmin = 0.25
            xmax = 1.0
            text = "two"
'''
SHORT = '''File type = "ooTextFile"
Object class = "TextGrid"

0
1.0
<exists>
1
"IntervalTier"
"words"
0
1.0
2
0
0.25
"one"
0.25
1.0
"two"
'''


def entries(text):
    (tier,) = parseTextgridStr(text, includeEmptyIntervals=True)["tiers"]
    return [(float(start), float(end), label) for start, end, label in tier["entries"]]


print("long format, times -0.5, 0.25, 1.0: intervals", entries(LONG))
print(f"short format: {len(entries(SHORT))} with a last line break, {len(entries(SHORT[:-1]))} without")
assert entries(LONG) == [(0.5, 0.25, "one"), (0.25, 1.0, "two")], "the sign is read"
assert len(entries(SHORT)) == 2
assert len(entries(SHORT[:-1])) == 1, "the last label is read"
PYTHON

python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q praatio==6.2.2
"$folder/env/bin/python" "$folder/try.py"
