"""Replacing a folder by another in one step."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

AT_FDCWD = -100  # linux/fcntl.h
RENAME_EXCHANGE = 2  # linux/fs.h
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)  # old kernel, or a file system that cannot


def replace_folder(new: Path, target: Path) -> None:
    """Put the folder ``new`` at ``target`` and delete what was there (a folder, a file or a link).

    The two exchange their names in one system call (Linux ``renameat2``), so there is always a whole folder at
    ``target``, also when the process is killed. Where that call does not exist, two renames leave an instant without.

    Raises:
        OSError: it cannot be done; ``target`` is as it was.
    """
    if not os.path.lexists(target):
        new.rename(target)
        return
    old = new
    if not exchange(new, target):
        old = new.with_name(f"{new.name}.old")
        target.rename(old)
        try:
            new.rename(target)
        except OSError:
            old.rename(target)
            raise
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink()


def exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically; False when this system cannot.

    Raises:
        OSError: it can, but not with these (missing, no permission).
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(second))
