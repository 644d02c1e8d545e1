"""How an unmodified script is given the checkpoint to resume from: `--resume-arg`, a template or a preset's name."""

from __future__ import annotations

import re

PRESETS = {
    # transformers: TrainingArguments.resume_from_checkpoint, parsed by HfArgumentParser and read by the example scripts
    "transformers": "--resume_from_checkpoint {path}",
    # Lightning: `ckpt_path` of fit/validate/test, which LightningCLI offers for every subcommand
    "lightning": "--ckpt_path {path}",
    # Megatron-LM: --load is the directory above, --ckpt-step the iteration, so that its tracker file is not used
    "megatron": "--load {dir} --ckpt-step {step}",
}

FIELDS = ("path", "dir", "name", "step")
"""{path}: the checkpoint; {dir} and {name}: its directory and its last part, such as DeepSpeed's tag; {step}: the
number in that last part."""

_FIELD = re.compile(r"\{(path|dir|name|step)\}")
_LIKE_A_FIELD = re.compile(r"\{([A-Za-z_]*)\}")


def resume_args(template: str, path: str) -> list[str]:
    """Make the arguments that name this checkpoint: split as a shell would, then filled in, so that no path is split.

    Raises ValueError, one line for the user, if the template needs a step and the name has none.
    """
    import shlex

    directory, _, name = path.rstrip("/").rpartition("/")
    values = {"path": path, "dir": directory or ("/" if path.startswith("/") else "."), "name": name}
    template = PRESETS.get(template, template)
    if "{step}" in template:
        from gpulaunch.launcher.checkpoint.names import step_of

        step = step_of(name)
        if step is None:
            raise ValueError(f"--resume-arg contains {{step}}, but the name {name!r} contains no step")
        values["step"] = str(step)
    return [_FIELD.sub(lambda field: values[field[1]], part) for part in shlex.split(template)]


def check_template(text: str) -> str | None:
    """Say why a text is not a valid template; None if it is."""
    import shlex

    if text in PRESETS:
        return None
    presets = ", ".join(PRESETS)
    unknown = [name for name in _LIKE_A_FIELD.findall(text) if name not in FIELDS]
    if unknown:
        return f"{text!r} contains {{{unknown[0]}}}; available: {', '.join(f'{{{name}}}' for name in FIELDS)}"
    if not _FIELD.search(text):
        return f"{text!r} contains no {{path}} and is not a preset ({presets})"
    try:
        shlex.split(text)
    except ValueError as err:
        return f"{text!r} cannot be split into arguments: {err}"
    return None
