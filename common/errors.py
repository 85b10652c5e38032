"""The exceptions that a command turns into an exit code; any other is a bug (exit 70)."""


class BadInput(ValueError):
    """What the user gave cannot be used: the field, what was given, what is allowed, the remedy."""

    exit_code = 2


class MissingStore(BadInput, FileNotFoundError):
    """The address holds no store, or no committed pack."""


class DamagedStore(OSError):
    """A byte of the store is not what was written; names the pack and array, or the file."""

    exit_code = 1


class FoundProblems(RuntimeError):
    """The command finished and found something wrong: verification, a gate, a quarantine."""

    exit_code = 1


class Stopped(RuntimeError):
    """Stopped before the end; what is committed is safe and the same command resumes."""

    exit_code = 3
