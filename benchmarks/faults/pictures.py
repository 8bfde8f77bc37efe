"""Pictures of docs/analyze.md: parts of the pages of toy runs, as Chromium shows them.

    python -m benchmarks.faults pictures --out docs/img

needs Chromium (Debian: apt install chromium fonts-dejavu-core).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageChops

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HIGH = 3000  # CSS pixels, more than any part is high; the rest is cut off
MARGIN = 16  # pixels around a part
COLOURS = 128  # of a file, which is then a third as large
RUNS = (  # name and seed
    ("frozen_sampler", 0),
    ("stale_weights", 0),
    ("before_temperature", 0),
    ("quantised", 0),
    ("healthy", 1),
)


@dataclass(frozen=True)
class Picture:
    """A part of a page.

    Args:
        runs: the folders of runs that the page shows, one or two.
        hides: CSS selector of what is not in the picture.
        width: of the window, CSS pixels.
        scale: pixels for each CSS pixel.

    """

    runs: tuple[str, ...]
    hides: str
    width: int
    scale: float = 1.0


STALE, TEMPERATURE = ("stale_weights_0", "healthy_1"), ("before_temperature_0", "quantised_0")
AROUND = "header, section:not(#pictures), #pictures > :not(.pictures)"  # the figures
PICTURES = {
    "findings": Picture(("frozen_sampler_0",), "section:not(#findings)", 1100, 1.5),
    "analyze_findings": Picture(STALE, "section:not(#findings, #numbers)", 1280),
    "analyze_timeline": Picture(STALE, f"{AROUND}, figure:not(#picture-timeline)", 640),
    "analyze_whatif": Picture(STALE, "header, section:not(#whatif)", 1180),
    "analyze_probability": Picture(TEMPERATURE, f"{AROUND}, figure:not(#picture-probability)", 640),
}


def draw(out: Path, write_runs: Callable[[Path], None]) -> str:
    """Writes the pictures below ``out``, from runs that ``write_runs`` makes below a folder."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="slime_ext_pictures_") as folder:
        runs = Path(folder, "runs/faults")
        write_runs(runs)
        for name, picture in PICTURES.items():
            with Image.open(_shown(_page(Path(folder), picture), picture)) as shot:
                trimmed(shot.convert("RGB")).quantize(COLOURS).save(out / f"{name}.png", optimize=True)
    return "\n".join(f"{out / name}.png" for name in PICTURES)


def _page(folder: Path, picture: Picture) -> Path:
    """Writes the page of a picture's runs, in which only the picture's part is visible."""
    first, *second = (f"runs/faults/{name}" for name in picture.runs)
    against = ["--against", *second] if second else []
    command = [sys.executable, "-m", "slime_ext", "analyze", first, *against, "--out", "page.html"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=_environment())
    page = folder / "page.html"
    style = f"<style>{picture.hides} {{ display: none !important; }}</style></head>"
    page.write_text(page.read_text().replace("</head>", style, 1))
    return page


def _environment() -> dict[str, str]:
    """Lets a command that runs in another folder import this checkout."""
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


def _shown(page: Path, picture: Picture) -> Path:
    """Takes the picture of a page as Chromium shows it; the part is at its top."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"pictures: expected one of {', '.join(BROWSERS)}, got none: apt install chromium")
    shot = page.with_suffix(".png")
    size = [f"--window-size={picture.width},{HIGH}", f"--force-device-scale-factor={picture.scale}"]
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu", *size]
    subprocess.run(
        [browser, *flags, f"--screenshot={shot}", page.as_uri()], check=True, stderr=subprocess.DEVNULL
    )
    return shot


def trimmed(image: Image.Image) -> Image.Image:
    """Cuts off the background around what is drawn, except ``MARGIN``.

    The background is the colour of the last pixel.

    >>> image = Image.new("RGB", (200, 100), "white")
    >>> image.paste("black", (50, 40, 90, 50))
    >>> trimmed(image).size
    (72, 42)
    """
    background = Image.new("RGB", image.size, image.getpixel((image.width - 1, image.height - 1)))
    left, top, right, bottom = ImageChops.difference(image, background).getbbox()
    return image.crop((max(left - MARGIN, 0), max(top - MARGIN, 0), right + MARGIN, bottom + MARGIN))
