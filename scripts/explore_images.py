"""Take the pictures of docs/explore.md anew, in a headless Chromium (KV_HF_CHROMIUM, or one on PATH).

python scripts/explore_images.py
"""

import io
import os
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from kv_hf.planner.explore.models import offered
from kv_hf.planner.explore.page import build_page

IMAGES = Path(__file__).parent.parent / "docs" / "images"
WIDTH = 1280
# name -> (theme, what was chosen, first element, last element)
PICTURES = {
    "explore.png": ("light", "", ".top", "section[aria-labelledby=table-title]"),
    "explore-dark.png": (
        "dark",
        "#model=gemma-3-27b&batch=8&context=32768&device=h100",
        "section[aria-labelledby=curve-title]",
        "section[aria-labelledby=accuracy-title]",
    ),
}


def main() -> None:
    browser = os.environ.get("KV_HF_CHROMIUM") or shutil.which("chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "page.html"
        file.write_text(build_page(offered([])), encoding="utf-8")
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for name, (theme, link, first, last) in PICTURES.items():
            context = chromium.new_context(
                viewport={"width": WIDTH, "height": 1400},
                color_scheme="dark" if theme == "dark" else "light",
            )
            page = context.new_page()
            page.goto(file.as_uri() + link)
            start, end = (page.locator(one).bounding_box() for one in (first, last))
            assert start is not None and end is not None
            left = max(0, start["x"] - 20)
            top = max(0, start["y"] - 20)
            shot = page.screenshot(
                full_page=True,
                timeout=120_000,
                clip={
                    "x": left,
                    "y": top,
                    "width": min(WIDTH, start["x"] + start["width"] + 20) - left,
                    "height": end["y"] + end["height"] + 20 - top,
                },
            )
            # the method that keeps rare colours, such as those of the legend
            picture = Image.open(io.BytesIO(shot)).convert("RGB")
            picture = picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            picture.save(IMAGES / name, optimize=True)
            print(IMAGES / name, (IMAGES / name).stat().st_size)


if __name__ == "__main__":
    main()
