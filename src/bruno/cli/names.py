"""The arguments of the library by the names that they have on the command line."""

from __future__ import annotations

import typer

# Settings of recipes that some commands also have as an option, with the parameter of the command.
_SETTINGS = {
    "data.name": "data",
    "data.group": "group",
    "data.skip_bad": "skip_bad",
    "train.steps": "steps",
    "train.minutes": "minutes",
    "train.seed": "seed",
}


def option_names(context: typer.Context) -> dict[str, str]:
    """The parameters of the command that runs, as its help names them: ``{"one_set": "--one-set"}``."""
    names = {}
    for parameter in context.command.params:
        name = str(parameter.name)
        if parameter.param_type_name == "argument":
            names[name] = str(getattr(parameter, "metavar", None)).rstrip(".")
            continue
        names[name] = parameter.opts[0]
        if parameter.secondary_opts:
            names[f"{name}=False"] = parameter.secondary_opts[0]  # --no-invert
    if "settings" in names:
        given = {text.partition("=")[0].strip() for text in context.params["settings"] or ()}
        as_options = _SETTINGS.keys() - given
        names |= {setting: names[_SETTINGS[setting]] for setting in as_options if _SETTINGS[setting] in names}
    return names
