"""How much memory a run takes on every GPU and host, phase by phase, before anything starts.

``budget.memory_budget`` is the way in; nothing here touches a device or a process group.
"""
