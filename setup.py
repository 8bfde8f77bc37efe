"""Packaging of slime-ext; which build of torch it is tested with says the Makefile."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "slime_ext/__init__.py").read_text(), re.M)[1]
TORCH = "torch>=2.5"
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
    name="slime-ext",
    version=VERSION,
    description="Off-policy correction for Megatron RL: composable, validated hooks at slime's policy loss",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author="The slime_ext authors",
    # Of the hosts: this project has no public address of its own yet.
    project_urls={"slime": "https://github.com/THUDM/slime", "miles": "https://github.com/radixark/miles"},
    keywords=["reinforcement learning", "LLM", "importance sampling", "off-policy", "Megatron", "slime"],
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["slime_ext", "slime_ext.*", "slime_ext_cpu", "slime_ext_cpu.*"]),
    data_files=[(f"share/slime-ext/{folder}", files) for folder, files in SHIPPED.items()],
    package_data={
        "slime_ext": ["py.typed"],
        "slime_ext_cpu": ["requirements.txt", "site/*.py"],
        "slime_ext.tools.analysis.page": ["page.html.j2", "pictures.yaml", "style.css"],
    },
    # All that a training process imports: tests/alone.py.
    install_requires=[TORCH, "PyYAML>=6,<7"],
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
    entry_points={
        "console_scripts": ["slime-ext=slime_ext.tools.commands.cli:main"],
        "verl.plugins": ["slime_ext=slime_ext.adapters.verl"],
    },
)
