"""Images of the demo: digits for training and test, rotated digits, and letters as images that are no digits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample

from ..data import load_dataset
from ..data.examples import Examples

__all__ = ["ANGLES", "DigitImages", "load_images", "rotate"]

ANGLES = (0, 15, 30, 45, 60, 75, 90)
LETTERS = "ACDEFGHJKLMNPRTUVWXYabdefhkmnprtwxy"  # none that looks like a digit: no B, I, O, Q, S, Z, g, l, o, q, s, z
FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif",
    "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "cmr10", "cmtt10",
)  # fmt: skip


class DigitImages(NamedTuple):
    """Pixels from 0 to 1 (image, 64), and labels; letters have none."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    letters: Tensor


def load_images() -> DigitImages:
    """Load the digits of scikit-learn, and draw the letters."""
    data = load_dataset("digits", progress=False)
    return DigitImages(*_tensors(data.train), *_tensors(data.test), draw_letters())


def _tensors(examples: Examples) -> tuple[Tensor, Tensor]:
    x, y = examples.__getitems__(list(range(len(examples))))
    return x.flatten(1).float(), y


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Rotate images of 8x8 pixels about their centre, with bilinear interpolation; what comes from outside is 0."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = torch.tensor([[c, -s, 0.0], [s, c, 0.0]]).expand(len(images), 2, 3)
    grid = affine_grid(turn, [len(images), 1, 8, 8], align_corners=False)
    return grid_sample(images.view(-1, 1, 8, 8), grid, align_corners=False).flatten(1)


def draw_letters() -> Tensor:
    """Draw letters in matplotlib's fonts as the digits were made: 32x32 black and white pixels, counted in 4x4 blocks."""
    import matplotlib
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    folder, drawn = Path(matplotlib.get_data_path(), "fonts", "ttf"), []
    for name in FONTS:
        font = ImageFont.truetype(str(folder / f"{name}.ttf"), 64)
        for letter in LETTERS:
            canvas = Image.new("L", (128, 128))
            ImageDraw.Draw(canvas).text((32, 24), letter, fill=255, font=font)
            glyph = canvas.crop(canvas.getbbox()).resize((24, 32))  # digits fill the height, and are narrower
            framed = Image.new("L", (32, 32))
            framed.paste(glyph, (4, 0))
            drawn.append(torch.from_numpy(np.array(framed)) > 127)
    return avg_pool2d(torch.stack(drawn).float().unsqueeze(1), 4).flatten(1)
