"""Main module of the standby. Thin and guarded, since multiprocessing may import it again in a rank."""

from __future__ import annotations

if __name__ == "__main__":
    from nbddp.supervisor.standby import main

    main()
