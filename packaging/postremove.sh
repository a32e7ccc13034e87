#!/bin/sh
# Runs after the package is removed, under dpkg and rpm.
set -e

if [ -d /run/systemd/system ]; then
	systemctl daemon-reload
fi
# The policy is the administrator's, and not a file of the package.
if [ "$1" = purge ]; then
	rm -f /etc/slipstream/policy.yaml
	if [ -d /etc/slipstream ]; then
		rmdir --ignore-fail-on-non-empty /etc/slipstream
	fi
fi
