"""Makes a workspace of Weights & Biases with the charts of tensorboard.yaml.

pip install wandb-workspaces
python configs/panels/wandb_workspace.py ENTITY PROJECT
"""

import sys
from pathlib import Path

import wandb_workspaces.reports.v2 as charts
import wandb_workspaces.workspaces as workspaces
import yaml

LAYOUT = Path(__file__).with_name("tensorboard.yaml")
STEP = "train/step"


def workspace(entity: str, project: str) -> workspaces.Workspace:
    """Makes the workspace, and does not save it."""
    sections = [
        workspaces.Section(
            name=name,
            panels=[
                charts.LinePlot(title=title, x=STEP, y=[tag.removesuffix("$") for tag in tags])
                for title, (_, tags) in plots.items()
            ],
            is_open=True,
        )
        for name, plots in yaml.safe_load(LAYOUT.read_text()).items()
    ]
    return workspaces.Workspace(entity=entity, project=project, name="off-policy", sections=sections)


if __name__ == "__main__":
    workspace(*sys.argv[1:]).save()
