"""`bruno data`."""

from __future__ import annotations

from bruno.cli.options import DataDir
from bruno.cli.output import console


def data(data_dir: DataDir = None) -> None:
    """List the known datasets: which are available, and where to get the others."""
    from bruno.data import DATASETS, expected_path, locate, locate_compact, locate_local_form

    lines = []
    for name, dataset in DATASETS.items():
        files, compact = locate(name, data_dir), locate_compact(name, data_dir)
        local = locate_local_form(name, data_dir)
        found = {str(path.parent) for path in (*files.values(), *(local[1] if local else ())) if path}
        missing = [remote for remote in dataset.files if not files[remote.path] and not compact and not local]
        state = "missing" if missing else "available" if files or compact else "built in"
        where = f", in {compact or ', '.join(sorted(found))}" if state == "available" else ""
        lines.append(f"{name:<14} {state:<9} {dataset.title}{where}")
        for remote in missing:
            path = expected_path(remote, data_dir)
            lines.append(f"    put {path.name} into {path.parent}/")
            lines += [f"        {'or' if i else 'get it'} from {url}" for i, url in enumerate(remote.mirrors)]
    lines.append("Missing datasets are downloaded when they are first used, if there is a network.")
    for line in lines:  # never wrapped: paths and addresses are there to be copied
        console.print(line, highlight=False, markup=False, soft_wrap=True)
