"""The errors of PocketDiT. Each subclasses a builtin: ValueError for what the user gave, RuntimeError for what happened."""


class PocketDiTError(Exception):
    """Anything PocketDiT refuses, with a message that says what, got, expected, next action."""


class SchemaError(PocketDiTError, ValueError):
    """A configuration or manifest has unknown, missing or ill-typed keys; the message lists all of them."""


class BundleError(PocketDiTError, ValueError):
    """A bundle is incomplete, altered, or of another schema version."""


class ContractError(PocketDiTError, ValueError):
    """A tensor's dtype or shape is not what the manifest states for this method."""


class CheckpointError(PocketDiTError, RuntimeError):
    """A checkpoint cannot be used with this bundle or these settings."""


class NonFiniteLossError(PocketDiTError, RuntimeError):
    """The loss or a gradient became NaN or infinite; nothing of that step is saved."""


class BudgetExceededError(PocketDiTError, RuntimeError):
    """Training needs, or took, more private memory than its budget."""


class StorageFullError(PocketDiTError, RuntimeError):
    """The storage is full; what was saved before is untouched."""


class ExportError(PocketDiTError, RuntimeError):
    """A block cannot become a program: an operator is missing or a shape or dtype is left open."""
