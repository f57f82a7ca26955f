"""`bruno data`."""

from __future__ import annotations

from bruno.cli.options import DataDir
from bruno.cli.output import console


def data(data_dir: DataDir = None) -> None:
    """List the known datasets: which are available, and where to get the others."""
    from bruno.data import dataset_status

    lines = []
    for one in dataset_status(data_dir):
        where = f", in {', '.join(map(str, one.places))}" if one.places else ""
        lines.append(f"{one.name:<14} {one.state:<9} {one.title}{where}")
        for path, addresses in one.missing.items():
            lines.append(f"    put {path.name} into {path.parent}/")
            lines += [f"        {'or' if i else 'get it'} from {url}" for i, url in enumerate(addresses)]
    lines.append("Missing datasets are downloaded when they are first used, if there is a network.")
    for line in lines:  # never wrapped: paths and addresses are there to be copied
        console.print(line, highlight=False, markup=False, soft_wrap=True)
