"""``seht bench``: what each estimator costs, how exact its gradient is and how much it varies.

One idea per file: the networks (``cases``), what is run on them (``rows``, ``runners``), the
measurements (``timing``, ``memory``, ``accuracy``) and what becomes of them (``results``,
``report``, ``plot``). ``run`` measures, ``command`` is the command.
"""
