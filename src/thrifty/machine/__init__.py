"""Facts of this machine: CPU features, cgroup limits, measured rates, contention, throughput, energy."""
