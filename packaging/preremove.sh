#!/bin/sh
# Runs before the package is removed, under dpkg and rpm: stops the agent, and restores what the agent and slipstream accel
# have changed. An upgrade leaves all that.
set -e

case "$1" in
remove | 0) ;;
*) exit 0 ;;
esac

if [ -d /run/systemd/system ]; then
	systemctl disable --now slipstream-agent.service
elif command -v systemctl >/dev/null; then
	systemctl disable slipstream-agent.service
fi
# Without a journal nothing has been changed since the machine started.
if [ -d /run/slipstream/journal ]; then
	if ! slipstream agent --revert || ! slipstream accel revert; then
		# To fail would leave a package that cannot be removed, and no setting outlives a reboot.
		echo "slipstream: the settings named above are not as they were before: a reboot restores them" >&2
	fi
fi
