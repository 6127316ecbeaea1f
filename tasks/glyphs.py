"""Glyphs: an Omniglot-like data set that needs no download, drawn from the fonts inside matplotlib.

Letters of 15 scripts come in up to two dozen faces. As in Omniglot, each is drawn 20 times, ink 1 on paper 0, by
drawers of different slant, size, stroke width and steadiness; the 28x28 pictures are made on first use, in seconds,
and cached. Test scripts are not seen in training. Of letters that resemble each other (the O of Latin, Greek and
Armenian; also o and O, as letters are drawn equally large) one is kept, so that no outline of the test split occurs
in training.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metasam.tasks.cache import cached, need, progress
from metasam.tasks.counter import fold, uniform
from metasam.tasks.episodes import ImageEpisodes

SCRIPTS = {
    # in the order of who keeps an outline that several scripts share: held-out scripts are small, training has plenty
    "test": ("ARMENIAN", "HEBREW", "LAO", "TIFINAGH"),
    "validation": ("NKO", "OGHAM", "OLD ITALIC"),
    "train": ("LATIN", "GREEK", "CYRILLIC", "COPTIC", "GEORGIAN", "CANADIAN SYLLABICS", "ARABIC", "LISU"),
}
"""The scripts of each split, as Unicode names them."""

DRAWERS = 20
RESEMBLANCE = 0.94
"""Letters count as one above this cosine similarity of their masters at 14x14 (DejaVu Sans: oO 0.96, EF 0.89)."""

# the other font files hold symbols only, or symbols at the code points of letters
_FACES = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "cmb10", "cmmi10", "cmr10", "cmss10", "cmti10", "cmtt10")
_SIZE, _MASTER, _INK = 28, 56, 40  # pixels: side of a picture, side of a master, longest side of the letter in it


class Glyphs(ImageEpisodes):
    """Few-shot classification of letters of unseen scripts, 28x28; needs matplotlib and Pillow, but no data.

    The pictures do not depend on ``seed``, which is that of the episodes; one cached file (14 MB) serves all runs.

    Args:
        ways: classes in an episode.
        shots: support images a class.
        queries: query images a class; there are 20 pictures of each letter.
        seed: of all episodes.
        rotations: add the training letters turned by 90, 180 and 270 degrees as new classes.
        warp: random affine maps of training letters, see `ImageEpisodes`.
        noise: share of wrong labels in support sets, see `ImageEpisodes`.
        classes: number of training letters; None: all.

    Raises:
        ImportError: matplotlib or Pillow is not installed.
        ValueError: an argument does not fit, see `ImageEpisodes`.
    """

    def __init__(
        self,
        ways: int = 5,
        shots: int = 1,
        queries: int = 15,
        seed: int = 0,
        rotations: bool = False,
        warp: float = 0.0,
        noise: float = 0.0,
        classes: int | None = None,
    ) -> None:
        data = load_glyphs()
        names = data["names"]
        splits = [next(s for s, scripts in SCRIPTS.items() if name.startswith(scripts)) for name in names]
        rows = {split: [i for i, s in enumerate(splits) if s == split] for split in ("train", "validation", "test")}
        pictures = data["images"].unflatten(0, (len(names), DRAWERS))
        super().__init__(
            {s: (pictures[i].flatten(0, 1), torch.tensor(i).repeat_interleave(DRAWERS)) for s, i in rows.items()},
            ways=ways,
            shots=shots,
            queries=queries,
            seed=seed,
            rotations=rotations,
            warp=warp,
            noise=noise,
            classes=classes,
            class_names=names,
            name="glyphs",
        )

    def describe(self) -> dict[str, Any]:
        """Return the facts of `ImageEpisodes.describe` and the scripts of each split."""
        facts = super().describe()
        for split, scripts in SCRIPTS.items():
            facts["splits"][split]["scripts"] = list(scripts)
        return facts


def load_glyphs() -> dict[str, Any]:
    """Return the drawn or cached ``{"names": [n], "images": uint8 [n * 20, 1, 28, 28]}``, 20 pictures a letter.

    Raises:
        ImportError: matplotlib or Pillow is not installed.
    """
    matplotlib, pillow = need("matplotlib"), need("PIL")
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    faces = sorted(f for f in folder.glob("*.ttf") if f.name.startswith(_FACES) and "Display" not in f.name)
    # whatever may change a pixel: this file, the fonts, and who rasterises and warps them
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in [Path(__file__), *faces])).hexdigest()
    key = {"source": digest, "pillow": pillow.__version__, "torch": str(torch.__version__)}
    return cached("glyphs", json.dumps(key, sort_keys=True), lambda: _build(faces))


def masters(faces: list[Path]) -> dict[str, list[Tensor]]:
    """Return the letters of all scripts, each as one upright uint8 master ``[56, 56]`` a face that has it.

    A letter is a code point of category Lu, Ll or Lo without a decomposition (no accents, ligatures or styled copies).
    Masters are centred and equally large: 40 pixels along the longer side.

    Raises:
        ImportError: matplotlib or Pillow is not installed.
    """
    ft2font = need("matplotlib.ft2font")
    found: dict[str, list[Tensor]] = {}
    for face in progress(faces, "reading fonts"):
        points = [p for p in sorted(ft2font.FT2Font(str(face)).get_charmap()) if _script(chr(p))]
        missing, *drawn = _render(face, ["\U0010ffff", *map(chr, points)])
        for point, master in zip(points, drawn, strict=True):
            if master.any() and not torch.equal(master, missing):
                found.setdefault(chr(point), []).append(master)
    return found


def distinct(letters: dict[str, list[Tensor]]) -> list[str]:
    """Return the letters to keep: in the order of `SCRIPTS`, those that resemble none before them in any two faces."""
    scripts = [script for members in SCRIPTS.values() for script in members]
    order = sorted(letters, key=lambda letter: (scripts.index(_script(letter)), letter))
    owner = torch.tensor([i for i, letter in enumerate(order) for _ in letters[letter]])
    shapes = torch.stack([master for letter in order for master in letters[letter]])
    shapes = F.normalize(F.avg_pool2d(shapes.float(), 4).flatten(1))
    rivals: list[set[int]] = [set() for _ in order]
    for stop in range(1024, len(owner) + 1024, 1024):
        mine, others = (shapes[stop - 1024 : stop] @ shapes[:stop].T > RESEMBLANCE).nonzero().unbind(1)
        for i, j in torch.stack([owner[mine + stop - 1024], owner[others]], 1).unique(dim=0).tolist():
            rivals[i].add(j)
    kept: set[int] = set()
    for i in range(len(order)):
        if not rivals[i] & kept:
            kept.add(i)
    return [order[i] for i in sorted(kept)]


def draw(master: Tensor, keys: Tensor) -> Tensor:
    """Draw uint8 pictures ``[N, 1, 28, 28]`` of masters ``[N, 56, 56]``, in the hands that keys ``[N]`` stand for."""
    n = len(keys)
    turn, slant, aspect, size, dx, dy, stroke = uniform(keys, 7).float().mul(2).sub(1).unbind(1)  # U[-1, 1]
    wobble = uniform(keys, 32, start=7).float().sub(0.5).mul(0.16).view(n, 2, 4, 4)
    # from picture to master: turn by up to 12 degrees, then slant, then scale, shift, and shake
    cos, sin = torch.cos(0.2 * turn), torch.sin(0.2 * turn)
    x_scale, y_scale = torch.exp(0.08 + 0.13 * size + 0.12 * aspect), torch.exp(0.08 + 0.13 * size - 0.12 * aspect)
    shear = 0.25 * slant
    rows = [
        x_scale * (cos + shear * sin),
        x_scale * (shear * cos - sin),
        0.08 * dx,
        y_scale * sin,
        y_scale * cos,
        0.08 * dy,
    ]
    grid = F.affine_grid(torch.stack(rows, 1).view(n, 2, 3), [n, 1, _MASTER, _MASTER], align_corners=False)
    grid = grid + F.interpolate(wobble, size=_MASTER, mode="bicubic", align_corners=False).permute(0, 2, 3, 1)
    ink = F.grid_sample(master.float().unsqueeze(1) / 255, grid, align_corners=False)
    # a blurred edge crosses a low level further out than a high one: the level is the width of the pen
    for _ in range(2):
        ink = F.avg_pool2d(ink, 3, stride=1, padding=1)
    ink = (4 * (ink - (0.34 + 0.12 * stroke).view(n, 1, 1, 1)) + 0.5).clamp(0, 1)
    return F.avg_pool2d(ink, _MASTER // _SIZE).mul(255).round().to(torch.uint8)


def _script(letter: str) -> str:
    """Return the script of a letter that belongs here, else an empty string."""
    if unicodedata.category(letter) not in ("Lu", "Ll", "Lo") or unicodedata.decomposition(letter):
        return ""
    name = unicodedata.name(letter, "")
    return next((s for scripts in SCRIPTS.values() for s in scripts if name.startswith(s + " ")), "")


def _render(face: Path, letters: list[str]) -> Iterator[Tensor]:
    numpy, image, imagedraw, imagefont = map(need, ("numpy", "PIL.Image", "PIL.ImageDraw", "PIL.ImageFont"))
    # the basic layout, as the other one depends on a library that may be missing
    font = imagefont.truetype(str(face), 64, layout_engine=imagefont.Layout.BASIC)
    for letter in letters:
        canvas, master = image.new("L", (320, 192)), image.new("L", (_MASTER, _MASTER))
        imagedraw.Draw(canvas).text((96, 48), letter, fill=255, font=font)
        box = canvas.getbbox() or (0, 0, 0, 0)
        longest = max(box[2] - box[0], box[3] - box[1])
        if longest >= 24:  # of 64 to the em; superscript dots and strokes would become blots
            scale = _INK / longest
            width, height = (max(1, round(scale * (box[i + 2] - box[i]))) for i in (0, 1))
            ink = canvas.resize((width, height), image.Resampling.BILINEAR, box=box)
            master.paste(ink, ((_MASTER - width) // 2, (_MASTER - height) // 2))
        yield torch.from_numpy(numpy.array(master))


def _build(faces: list[Path]) -> dict[str, Any]:
    letters = masters(faces)
    kept = distinct(letters)
    models = torch.stack([letters[letter][d % len(letters[letter])] for letter in kept for d in range(DRAWERS)])
    # keyed by the letter itself, so that it is drawn alike whichever others there are
    points = torch.tensor([ord(letter) for letter in kept])
    keys = fold(points.unsqueeze(1), torch.arange(DRAWERS)).flatten()
    pieces = list(zip(models.split(512), keys.split(512), strict=True))
    pictures = [draw(*piece) for piece in progress(pieces, "drawing letters")]
    return {"names": [unicodedata.name(letter) for letter in kept], "images": torch.cat(pictures)}
