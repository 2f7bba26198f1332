"""The command line: `lockstep-kv plan`, `replay` and `demo`."""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. Exits with 2 after one line on what cannot be done."""
    for package in ("typer", "rich"):
        if importlib.util.find_spec(package) is None:
            sys.exit(_refused(f"{package} is missing: pip install 'lockstep-kv[cli]'"))
    from lockstep_kv.commands import app  # noqa: PLC0415 - needs the optional packages
    from lockstep_kv.errors import LockstepKVError  # noqa: PLC0415

    try:
        app()
    except LockstepKVError as error:
        sys.exit(_refused(str(error)))
    except BrokenPipeError:
        # Whoever read the output has read enough.
        sys.stderr.close()
        sys.exit(1)


def _refused(message: str) -> int:
    sys.stderr.write(f"lockstep-kv: {message}\n")
    return 2


if __name__ == "__main__":
    main()
