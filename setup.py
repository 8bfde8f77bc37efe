"""What pyproject.toml cannot say: extras that share requirements, and the files beside the package.

Which build of torch it is tested with says the Makefile.
"""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
TOOLS = [  # of the commands: slime_ext/tools/commands/cli.py names their modules
    "rich>=13,<16",
    "Jinja2>=3.1,<4",
    "matplotlib>=3.7,<4",
    "numpy>=1.24,<3",
    "pydantic>=2.7,<3",  # the document of `analyze`
    "shtab>=1.7,<2",
    "bashkit>=0.20.1,<0.21",  # tests/tools/launch holds it to what bash does
]
HOST = (ROOT / "slime_ext_cpu/requirements.txt").read_text().split()
MODEL = ["gguf==0.19.0", "accelerate>=1.10,<2"]  # what reads the language model's file

SHIPPED: dict[str, list[str]] = {}  # folder -> files that commands look for beside the package
for path in sorted(p for room in ("configs", "patches") for p in (ROOT / room).rglob("*") if p.is_file()):
    SHIPPED.setdefault(str(path.parent.relative_to(ROOT)), []).append(str(path.relative_to(ROOT)))

setup(
    # `pip install -e` then writes the clone's path. By default it writes a finder, which Python asks last: in
    # the folder above the clone it would find the clone's folder first, which has the package's name.
    options={"editable_wheel": {"mode": "compat"}},
    data_files=[(f"share/slime-ext/{folder}", files) for folder, files in SHIPPED.items()],
    extras_require={
        "te": ["transformer-engine[pytorch]"],
        "dumps": ["safetensors>=0.4,<1", "straw-queue>=0.1.2,<0.2"],  # for tensors outside a dump's own file
        "tools": TOOLS,
        "train": [*TOOLS, *HOST, *MODEL],
        "dev": [
            "pytest<9.2",  # from which on pytest-xdist 3.8 ignores groups: pytest-dev/pytest-xdist issue 1386
            "pytest-xdist",
            "hypothesis",
            "mypy==2.4.1",
            "ruff==0.17.5",
            "pre-commit",
            "psutil",
            "markdown-it-py>=3,<5",  # renders every page as GitHub does
            "straw-queue>=0.1.2,<0.2",
            "playwright>=1.45,<2",
        ],
    },
)
