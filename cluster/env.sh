# Read by every shell on every host: `ray exec` and `ray down` say nothing but "ray", so it must be
# on the path of an ordinary login.
export PATH=$HOME/.disagg/venv/bin:$PATH
export RAY_AUTH_MODE=token          # with ~/.ray/auth_token, which the head makes and passes on
export RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=0        # else workers run at 15, behind everything else on their host
