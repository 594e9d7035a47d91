"""Errors that a user can cause and mend."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input. The message is one line: what came, what is allowed, what to do.

    The command line prints it and exits with code 2; the Python API raises it; the engine stays usable.
    """


class RankLost(RuntimeError):
    """A process of a tensor-parallel group is gone, and with it the model. The message names it; start anew."""
