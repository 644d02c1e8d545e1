"""Is a rank hung, and where: learnt allowances, then stacks, then one verdict."""

from __future__ import annotations
