package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"slipstream.dev/internal/agent"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/testenv"
)

type object = map[string]any

// api is the part of an API server that an agent uses. It stores objects by
// their paths, and knows nothing about their meaning.
type api struct {
	mu       sync.Mutex
	version  int
	objects  map[string]object
	watchers map[chan object]func(path string) bool
	// refuse returns the status with which to refuse a request; 0 to answer it.
	refuse func(verb, path string) int
	// prune drops fields of stored objects, as a schema does that does not know them, if it is not
	// nil.
	prune func(object)
	// token is the bearer token that requests need, if it is not empty.
	token string
	// asked counts requests by verb and resource. Those refused as stale count as "conflict", and those refused for their token
	// as "unauthorized".
	asked map[string]int
	// watched has the options of the last watch of each resource.
	watched map[string]url.Values
	// past has the changes since a version, for watches that begin in the past. sent counts the
	// events that were sent to watches.
	past  []change
	since int
	sent  int
	// dead means that it answers nothing.
	dead bool
	// daemonSet is the DaemonSet of the agents that join. boots has the boots of their machines, by node, if not the first.
	daemonSet string
	boots     map[string]string
	// late is the extra delay of events for agents of a fleet.
	late time.Duration
	// ahead is how far the server's clock is ahead of the agents'; it does not tell them if that is 0.
	ahead time.Duration
}

// change is an event for watches, and when it happened.
type change struct {
	version int
	path    string
	event   object
}

func newAPI() *api {
	return &api{
		objects: make(map[string]object), watchers: make(map[chan object]func(string) bool),
		asked: make(map[string]int), watched: make(map[string]url.Values), boots: make(map[string]string),
	}
}

func (s *api) fail(w http.ResponseWriter, code int, reason string) {
	w.Header().Set("Content-Type", "application/json")
	if code == http.StatusTooManyRequests {
		w.Header().Set("Retry-After", "1")
	}
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(object{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason})
}

// setPrune sets the function that drops fields of each stored object, nil for none.
func (s *api) setPrune(prune func(object)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.prune = prune
}

// withoutRollout does the work of a CRD that does not know rollouts.
func withoutRollout(o object) {
	if status, ok := o["status"].(object); ok {
		delete(status, "rollout")
	}
}

// put stores an object and sends the change to all watches of it.
func (s *api) put(path string, o object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.store(path, o)
}

func (s *api) store(path string, o object) {
	kind := "ADDED"
	if s.objects[path] != nil {
		kind = "MODIFIED"
	}
	if s.prune != nil {
		s.prune(o)
	}
	was, _ := json.Marshal(s.objects[path])
	if is, _ := json.Marshal(o); bytes.Equal(is, was) {
		return // a patch that changes nothing makes no new version
	}
	s.version++
	metadata, _ := o["metadata"].(object)
	metadata["resourceVersion"] = fmt.Sprint(s.version)
	s.objects[path] = o
	s.tell(path, kind, o)
}

func (s *api) tell(path, kind string, o object) {
	s.past = append(s.past, change{s.version, path, object{"type": kind, "object": o}})
	for ch, wants := range s.watchers {
		if wants(path) {
			ch <- object{"type": kind, "object": o}
		}
	}
}

func (s *api) remove(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o := s.objects[path]; o != nil {
		delete(s.objects, path)
		s.version++
		s.tell(path, "DELETED", o)
	}
}

// get returns a copy of an object, or nil.
func (s *api) get(path string) (o object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, _ := json.Marshal(s.objects[path])
	_ = json.Unmarshal(b, &o)
	return o
}

func (s *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	watching := r.URL.Query().Get("watch") != ""
	verb := map[string]string{"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}[r.Method]
	resource := resourceOf(r.URL.Path)
	both := watching && r.URL.Query().Get("sendInitialEvents") != ""
	switch {
	case both:
		verb = "list and watch"
	case watching:
		verb = "watch"
	case verb == "get" && lists[r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]] != nil:
		verb = "list"
	}
	path := strings.TrimSuffix(r.URL.Path, "/status")
	s.mu.Lock()
	known := s.token == "" || r.Header.Get("Authorization") == "Bearer "+s.token
	if known {
		s.asked[verb+" "+resource]++
		if watching {
			s.watched[resource] = r.URL.Query()
		}
	} else {
		s.asked["unauthorized"]++
	}
	refuse := s.refuse
	if s.ahead != 0 {
		w.Header().Set("Date", time.Now().Add(s.ahead).UTC().Format(http.TimeFormat))
	}
	s.mu.Unlock()
	if !known {
		s.fail(w, http.StatusUnauthorized, "Unauthorized")
		return
	}
	if refuse != nil {
		if code := refuse(verb, r.URL.Path); code != 0 {
			s.fail(w, code, map[int]string{401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 429: "TooManyRequests", 500: "InternalError"}[code])
			return
		}
	}
	prefix := path + "/"
	selected := func(at string) bool {
		name, ok := strings.CutPrefix(at, prefix)
		if !ok && strings.HasSuffix(path, "/pods") {
			ok = strings.HasPrefix(at, "/api/v1/namespaces/") && strings.Contains(at, "/pods/")
		}
		want, byName := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name=")
		return ok && (!byName || name == want)
	}
	reply := func(o any) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(o)
	}
	switch {
	case both:
		s.fail(w, http.StatusUnprocessableEntity, "Invalid")
	case watching:
		s.watch(w, r, selected)
	case r.Method == "GET" && s.get(path) != nil:
		reply(s.get(path))
	case r.Method == "GET" && lists[r.URL.Path[strings.LastIndexByte(path, '/')+1:]] != nil:
		s.mu.Lock()
		items := []any{}
		for at, o := range s.objects {
			if selected(at) && labelled(o, r.URL.Query().Get("labelSelector")) {
				items = append(items, o)
			}
		}
		list := maps.Clone(lists[path[strings.LastIndexByte(path, '/')+1:]])
		metadata := object{"resourceVersion": fmt.Sprint(s.version)}
		list["metadata"], list["items"] = metadata, items
		if strings.Contains(r.Header.Get("Accept"), "as=Table") {
			list = table(items)
		}
		b, _ := json.Marshal(list)
		s.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(b)
	case r.Method == "GET":
		s.fail(w, 404, "NotFound")
	case r.Method == "POST":
		var o object
		_ = json.NewDecoder(r.Body).Decode(&o)
		name := o["metadata"].(object)["name"].(string)
		delete(o, "status")
		s.put(path+"/"+name, o)
		reply(s.get(path + "/" + name))
	case r.Method == "PATCH":
		var patch object
		_ = json.NewDecoder(r.Body).Decode(&patch)
		s.mu.Lock()
		o := s.objects[path]
		version := ""
		if m, ok := patch["metadata"].(object); ok {
			version, _ = m["resourceVersion"].(string)
			delete(patch, "metadata")
		}
		switch {
		case o == nil:
			s.mu.Unlock()
			s.fail(w, 404, "NotFound")
			return
		case version != "" && version != o["metadata"].(object)["resourceVersion"]:
			s.asked["conflict"]++
			s.mu.Unlock()
			s.fail(w, 409, "Conflict")
			return
		}
		b, _ := json.Marshal(o)
		var copied object
		_ = json.Unmarshal(b, &copied)
		s.store(path, merge(copied, patch).(object))
		s.mu.Unlock()
		reply(s.get(path))
	case r.Method == "DELETE":
		s.remove(path)
		reply(object{"kind": "Status", "apiVersion": "v1", "status": "Success"})
	}
}

// resourceOf returns the resource of a path: "pods", or "nodeaccelerations/status".
func resourceOf(path string) string {
	path, status := strings.CutSuffix(path, "/status")
	for _, part := range strings.Split(path, "/") {
		if lists[part] != nil || part == "nodeaccelerations" || part == "events" {
			if status {
				return part + "/status"
			}
			if part != "nodes" || !strings.Contains(path, "nodeaccelerations") {
				return part
			}
		}
	}
	return path
}

// labelled reports whether an object has the labels of a selector of key=value.
func labelled(o any, selector string) bool {
	metadata, _ := o.(object)["metadata"].(object)
	has, _ := metadata["labels"].(object)
	for pair := range strings.SplitSeq(selector, ",") {
		if key, value, ok := strings.Cut(pair, "="); ok && has[key] != value {
			return false
		}
	}
	return true
}

// table returns a list of nodes, or of pods, in the form in which kubectl prints it.
func table(nodes []any) object {
	rows := []any{}
	for _, o := range nodes {
		if o := o.(object); o["kind"] == v1alpha1.KindNodeAcceleration {
			status, _ := o["status"].(object)
			summary, _ := status["summary"].(string)
			rows = append(rows, object{"cells": []any{o["metadata"].(object)["name"], "", "", "", summary}})
			continue
		} else if o["kind"] == "Pod" {
			rows = append(rows, object{"cells": []any{o["metadata"].(object)["name"], "Running", o["spec"].(object)["nodeName"]}})
			continue
		}
		var n corev1.Node
		b, _ := json.Marshal(o)
		_ = json.Unmarshal(b, &n)
		status := "NotReady"
		if at := readyCondition(&n); at == nil {
			status = "Unknown"
		} else if at.Status == corev1.ConditionTrue {
			status = "Ready,SchedulingDisabled"
		}
		rows = append(rows, object{"cells": []any{n.Name, status, "<none>", "3d"}})
	}
	columns := []any{object{"name": "Name"}, object{"name": "Status"}, object{"name": "Node"}, object{"name": "Age"}, object{"name": "Policies"}}
	return object{"kind": "Table", "apiVersion": "meta.k8s.io/v1", "columnDefinitions": columns, "rows": rows}
}

// lists has the kinds of lists, by the last element of their paths.
var lists = map[string]object{
	"nodes":                {"kind": "NodeList", "apiVersion": "v1"},
	"pods":                 {"kind": "PodList", "apiVersion": "v1"},
	"daemonsets":           {"kind": "DaemonSetList", "apiVersion": "apps/v1"},
	"accelerationpolicies": {"kind": "AccelerationPolicyList", "apiVersion": v1alpha1.APIVersion},
	"nodeaccelerations":    {"kind": "NodeAccelerationList", "apiVersion": v1alpha1.APIVersion},
}

// merge implements RFC 7386.
func merge(to, patch any) any {
	p, ok := patch.(object)
	if !ok {
		return patch
	}
	o, ok := to.(object)
	if !ok {
		o = object{}
	}
	for k, v := range p {
		if v == nil {
			delete(o, k)
		} else {
			o[k] = merge(o[k], v)
		}
	}
	return o
}

// kill ends all watches. The server answers nothing until start, and then rejects watches from earlier versions as expired.
func (s *api) kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dead = true
	for ch := range s.watchers {
		close(ch)
	}
	clear(s.watchers)
	s.version++ // some object always changes meanwhile
	s.past, s.since = nil, s.version
}

// setRefuse sets which requests are refused; nil for none.
func (s *api) setRefuse(refuse func(verb, path string) int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuse = refuse
}

func (s *api) start() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dead = false
}

func (s *api) watch(w http.ResponseWriter, r *http.Request, selected func(string) bool) {
	from, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	seconds, _ := strconv.Atoi(r.URL.Query().Get("timeoutSeconds"))
	timeout := time.NewTimer(time.Duration(seconds) * time.Second)
	defer timeout.Stop()
	ch := make(chan object, 1000)
	s.mu.Lock()
	if from < s.since {
		ch <- object{"type": "ERROR", "object": object{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": http.StatusGone}}
	}
	for _, c := range s.past {
		if c.version > from && selected(c.path) {
			ch <- c.event
		}
	}
	s.watchers[ch] = selected
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.watchers, ch)
		s.mu.Unlock()
	}()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(200)
	w.(http.Flusher).Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case <-timeout.C:
			return
		case e, ok := <-ch:
			if !ok {
				return
			}
			s.mu.Lock()
			s.sent++
			b, _ := json.Marshal(e)
			s.mu.Unlock()
			_, _ = w.Write(append(b, '\n'))
			w.(http.Flusher).Flush()
		}
	}
}

const (
	nodePath   = "/api/v1/nodes/node0"
	statePath  = "/apis/slipstream.dev/v1alpha1/nodeaccelerations/node0"
	policyPath = "/apis/slipstream.dev/v1alpha1/accelerationpolicies/"
	daemonPath = "/apis/apps/v1/namespaces/system/daemonsets/agent"

	namespacePath = "/api/v1/namespaces/system"
)

func nodeObject(labels object) object {
	return object{"apiVersion": "v1", "kind": "Node", "metadata": object{"name": "node0", "uid": "u-1", "labels": labels}}
}

func daemonSet() object {
	return object{"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": object{"name": "agent", "namespace": "system"}}
}

func namespace() object {
	return object{"apiVersion": "v1", "kind": "Namespace", "metadata": object{"name": "system"}}
}

func policyObject(name string, second, generation int, spec object) object {
	if spec["nodeSelector"] == nil {
		spec["all"] = true
	}
	return object{"apiVersion": v1alpha1.APIVersion, "kind": "AccelerationPolicy", "spec": spec, "metadata": object{
		"name": name, "uid": name, "generation": generation, "creationTimestamp": fmt.Sprintf("1999-01-01T00:00:%02dZ", second),
	}}
}

func accelerate(cpus string, devices ...string) []any {
	return []any{object{"rps": object{"devices": devices, "cpus": cpus}}}
}

// connect follows the cluster, and sends each desired state to the channel.
func (s *api) connect(t *testing.T) (*Cluster, chan agent.Desired) {
	t.Helper()
	c, err := New(s.config(), Options{Node: "node0", DaemonSet: "system/agent", Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	c.pace = hurry
	ctx, cancel := context.WithCancel(context.Background())
	desired := make(chan agent.Desired, 100)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.Run(ctx, func(d agent.Desired) { desired <- d })
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return c, desired
}

// next waits for a desired state with these policies and pods, by name.
func next(t *testing.T, desired chan agent.Desired, want ...string) agent.Desired {
	t.Helper()
	timeout := time.After(10 * time.Second)
	var got []string
	for {
		select {
		case d := <-desired:
			got = nil
			for _, p := range d.Policies {
				got = append(got, p.Name)
			}
			for _, p := range d.Pods {
				got = append(got, p.Name)
			}
			if slices.Equal(got, want) {
				return d
			}
		case <-timeout:
			t.Fatalf("desired is %q, want %q", got, want)
		}
	}
}

func TestCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		s.put(nodePath, nodeObject(object{"zone": "a"}))
		s.put(daemonPath, daemonSet())
		s.put(policyPath+"b", policyObject("b", 1, 1, object{"accelerate": accelerate("0", "nic")}))
		s.put(policyPath+"a", policyObject("a", 2, 1, object{"accelerate": accelerate("0", "pod"), "nodeSelector": object{"zone": "a"}}))
		s.put(policyPath+"c", policyObject("c", 1, 1, object{"accelerate": accelerate("0", "pod"), "nodeSelector": object{"zone": "b"}}))
		s.put("/api/v1/namespaces/default/pods/web", object{"apiVersion": "v1", "kind": "Pod", "metadata": object{"name": "web", "namespace": "default", "labels": object{"app": "web"}},
			"spec": object{"nodeName": "node0"}, "status": object{"podIPs": []any{object{"ip": "10.1.0.1"}, object{"ip": "fd00::1"}}}})
		c, desired := s.connect(t)

		d := next(t, desired, "b", "a") // only policies that select the node, by age; no pods, because no policy selects pods
		if uid := d.Policies[1].UID; uid != "a" {
			t.Errorf("the UID is %q, want that of the policy", uid)
		}

		// An invalid policy that the schema let pass.
		s.put(policyPath+"bad", policyObject("bad", 3, 1, object{"accelerate": accelerate("0", "loopback")}))
		d = next(t, desired, "b", "a", "bad")
		if err := d.Policies[2].Invalid; err == nil || !strings.Contains(err.Error(), `spec.accelerate[0].rps.devices[0]: must be nic, overlay, host-veth or pod, is "loopback"`) {
			t.Errorf("invalid: %v, want what and where", err)
		}
		s.remove(policyPath + "bad")
		next(t, desired, "b", "a")

		// A policy that selects pods: now they matter.
		s.put(policyPath+"s", policyObject("s", 4, 1, object{"accelerate": accelerate("0", "pod"), "pods": object{"matchLabels": object{"app": "web"}}}))
		d = next(t, desired, "b", "a", "s", "default/web")
		if p := d.Policies[2]; !p.Pods(map[string]string{"app": "web"}) || p.Pods(nil) || p.Selector != "app=web" {
			t.Errorf("%+v selects other pods than web", p)
		}
		if diff := cmp.Diff([]netip.Addr{netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd00::1")}, d.Pods[0].Addresses, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Error(diff)
		}
		s.put("/api/v1/namespaces/default/pods/host", object{"apiVersion": "v1", "kind": "Pod", "metadata": object{"name": "host", "namespace": "default"},
			"spec": object{"nodeName": "node0", "hostNetwork": true}, "status": object{"podIPs": []any{object{"ip": "192.0.2.1"}}}})
		s.remove("/api/v1/namespaces/default/pods/web")
		next(t, desired, "b", "a", "s")

		// The agent asks the API server only for pods that it can recognise, and for no bookmarks.
		s.mu.Lock()
		for resource, want := range map[string]string{"pods": "spec.nodeName=node0,status.podIP!=", "nodes": "metadata.name=node0", "accelerationpolicies": ""} {
			if q := s.watched[resource]; q == nil || q.Get("fieldSelector") != want || q.Get("allowWatchBookmarks") != "" {
				t.Errorf("%s are watched with %v, want the selector %q and no bookmarks", resource, q, want)
			}
			if n := s.asked["list and watch "+resource]; n > 0 {
				t.Errorf("%s: %d requests to list and watch at once", resource, n)
			}
		}
		s.mu.Unlock()

		// The node's labels change.
		s.put(nodePath, nodeObject(object{"zone": "b"}))
		next(t, desired, "b", "c", "s")

		c.Publish(agent.Status{Ready: true, Reason: v1alpha1.ReasonApplied, Message: "good", Settings: 3, Verified: 3,
			Policies: []v1alpha1.ObservedPolicy{{Policy: "b", Generation: 1, State: v1alpha1.StateApplied, Reason: v1alpha1.ReasonApplied, Settings: 3, Verified: 3}}})
		eventually(t, "state object", func() string {
			o := s.get(statePath)
			status, _ := o["status"].(object)
			if status == nil || fmt.Sprint(status["settings"]) != "3" {
				return fmt.Sprint(o)
			}
			owner := o["metadata"].(object)["ownerReferences"].([]any)[0].(object)
			condition := status["conditions"].([]any)[0].(object)
			if owner["kind"] != "Node" || owner["uid"] != "u-1" || condition["type"] != "Ready" || condition["status"] != "True" || condition["reason"] != "Applied" {
				t.Fatalf("%v", o)
			}
			return ""
		})
		c.Publish(agent.Status{Reason: v1alpha1.ReasonHeld, Message: "somebody"})
		eventually(t, "state object changes", func() string {
			status := s.get(statePath)["status"].(object)
			condition := status["conditions"].([]any)[0].(object)
			if condition["status"] != "False" || len(status["observed"].([]any)) != 0 {
				return fmt.Sprint(status)
			}
			return ""
		})

		// The same event again is not written.
		for range 3 {
			c.Notify(agent.Event{Warning: true, Reason: v1alpha1.ReasonHeld, Message: "somebody has it"})
		}
		c.Notify(agent.Event{Warning: true, Reason: v1alpha1.ReasonHeld, Message: "another has it"})
		eventually(t, "events", func() string {
			var messages []string
			s.mu.Lock()
			for path, o := range s.objects {
				if strings.HasPrefix(path, "/api/v1/namespaces/default/events/") {
					messages = append(messages, fmt.Sprint(o["message"]))
				}
			}
			s.mu.Unlock()
			slices.Sort(messages)
			return cmp.Diff([]string{"another has it", "somebody has it"}, messages)
		})
	})
}

// TestNoReportOfANodeThatIsGone checks that an agent whose Node object is deleted creates no NodeAcceleration: nothing would ever
// delete it. When the node is back, there is one again.
func TestNoReportOfANodeThatIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		s.put(nodePath, nodeObject(nil))
		c, desired := s.connect(t)
		next(t, desired)
		owner := func() string {
			metadata, _ := s.get(statePath)["metadata"].(object)
			for _, o := range asList(metadata["ownerReferences"]) {
				return fmt.Sprint(o["uid"])
			}
			return fmt.Sprint(metadata)
		}
		want := func(uid string) {
			t.Helper()
			eventually(t, "a NodeAcceleration", func() string {
				if got := owner(); got != uid {
					return fmt.Sprintf("its owner is %s, want %s", got, uid)
				}
				return ""
			})
		}
		c.Publish(agent.Status{Ready: true, Reason: v1alpha1.ReasonNoPolicy})
		want("u-1")
		time.Sleep(2 * time.Second) // until the agent watches its node
		s.remove(nodePath)
		s.remove(statePath) // the garbage collector's work
		time.Sleep(time.Second)
		c.Publish(agent.Status{Reason: v1alpha1.ReasonError})
		never(t, func() bool { return s.get(statePath) != nil })
		o := nodeObject(nil)
		o["metadata"].(object)["uid"] = "u-2"
		s.put(nodePath, o)
		want("u-2")
	})
}

// TestTimesAreTheServers: the clock of the API server is two hours ahead of the node's. What the agent writes has the server's time.
func TestTimesAreTheServers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		s.ahead = 2 * time.Hour
		s.put(nodePath, nodeObject(object{"zone": "a"}))
		s.put(daemonPath, daemonSet())
		s.put(policyPath+"a", policyObject("a", 1, 1, object{"accelerate": accelerate("0", "nic"), "nodeSelector": object{"zone": "a"}}))
		c, desired := s.connect(t)
		next(t, desired, "a")
		c.Publish(agent.Status{Ready: true, Reason: v1alpha1.ReasonApplied})
		c.Notify(agent.Event{Warning: true, Reason: v1alpha1.ReasonHeld, Message: "somebody has it"})
		time.Sleep(10 * time.Second)
		isTheServers := func(what string, text any) {
			t.Helper()
			at, err := time.Parse(time.RFC3339, fmt.Sprint(text))
			if ahead := time.Until(at); err != nil || ahead < s.ahead-time.Minute || ahead > s.ahead {
				t.Errorf("%s has the time %v, %s ahead of the node's, want 2h", what, text, ahead)
			}
		}
		conditions := 0
		for _, path := range []string{statePath, policyPath + "a"} {
			status, _ := s.get(path)["status"].(object)
			for _, condition := range asList(status["conditions"]) {
				conditions++
				isTheServers(fmt.Sprint(path, " ", condition["type"]), condition["lastTransitionTime"])
			}
		}
		if conditions < 3 { // Ready of the node, Selected and RolledOut of the policy
			t.Errorf("%d conditions", conditions)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		for path, o := range s.objects {
			if strings.HasPrefix(path, "/api/v1/namespaces/default/events/") {
				isTheServers(path, o["lastTimestamp"])
			}
		}
	})
}

// TestRestsWhateverTheWallClockSays: an agent whose write failed tries no other one until it has rested, also if the wall clock
// is stepped meanwhile.
func TestRestsWhateverTheWallClockSays(t *testing.T) {
	for _, step := range []time.Duration{time.Hour, -time.Hour} { // since the write
		c := &Cluster{rules: cache.NewStore(cache.MetaNamespaceKeyFunc)}
		for rest, want := range map[time.Duration]error{-time.Second: nil, time.Minute: errResting} {
			until := testenv.Stepped(time.Now().Add(rest), -step)
			c.restUntil.Store(&until)
			if err := c.mayWrite(&v1alpha1.AccelerationPolicy{}); !errors.Is(err, want) {
				t.Errorf("%s left to rest, and a step of %s: %v, want %v", rest, step, err, want)
			}
		}
	}
}

// TestPolicyIsParsedOnce checks that a version of a policy is parsed once, and forgotten when there
// is another.
func TestPolicyIsParsedOnce(t *testing.T) {
	c := &Cluster{complete: make(map[policyVersion]completePolicy)}
	node := &corev1.Node{}
	policy := func(generation int64, cpus string) *v1alpha1.AccelerationPolicy {
		return &v1alpha1.AccelerationPolicy{
			ObjectMeta: metav1.ObjectMeta{Name: "all", UID: "u-2", Generation: generation},
			Spec: v1alpha1.AccelerationPolicySpec{All: true, Accelerate: []v1alpha1.PolicyAccelerator{
				{Accelerator: v1alpha1.Accelerator{RPS: &v1alpha1.RPS{Devices: []string{v1alpha1.DevicePod}, CPUs: cpus}}},
			}},
		}
	}
	first, err := c.completed(policy(1, "0"))
	must(t, err)
	if again, _ := c.completed(policy(1, "0")); again != first {
		t.Error("the same version is parsed again")
	}
	invalid := policy(2, "x")
	for range 2 {
		if _, err := c.completed(invalid); err == nil {
			t.Error("an invalid version has no error")
		}
	}
	c.forget([]*v1alpha1.AccelerationPolicy{invalid}, node)
	if len(c.complete) != 1 {
		t.Errorf("%d versions are known, want the current one", len(c.complete))
	}
}

func TestSelectedCondition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPI()
		s.put(nodePath, nodeObject(object{"zone": "a"}))
		s.put(daemonPath, daemonSet())
		s.put(policyPath+"here", policyObject("here", 1, 3, object{"accelerate": accelerate("0", "nic"), "nodeSelector": object{"zone": "a"}}))
		s.put(policyPath+"nowhere", policyObject("nowhere", 1, 1, object{"accelerate": accelerate("0", "nic"), "nodeSelector": object{"zone": "z"}}))
		c, desired := s.connect(t)
		next(t, desired, "here")
		condition := func(policy string) string {
			status, _ := s.get(policyPath + policy)["status"].(object)
			if status == nil {
				return "none"
			}
			c := status["conditions"].([]any)[0].(object)
			return fmt.Sprint(c["type"], c["status"], c["reason"], c["observedGeneration"])
		}
		want := func(policy, is string) {
			t.Helper()
			testenv.Eventually(t, 30*time.Second, "condition of "+policy, func() string {
				if got := condition(policy); got != is {
					return fmt.Sprintf("it is %s, want %s", got, is)
				}
				return ""
			})
		}
		want("here", "SelectedTrueNodes3")
		// An agent with an outdated version does not overwrite the current one.
		stale := &v1alpha1.AccelerationPolicy{ObjectMeta: metav1.ObjectMeta{Name: "here", ResourceVersion: "1", Generation: 3}}
		if err := c.mark(t.Context(), stale, metav1.ConditionFalse, v1alpha1.ReasonNoNode, ""); !outdone(err) {
			t.Errorf("a stale mark: %v, want that it is outdone", err)
		}
		if got := condition("nowhere"); got != "none" {
			t.Errorf("nowhere is %s at once; other agents have had no time", got)
		}
		s.put(nodePath, nodeObject(object{"zone": "b"}))
		want("here", "SelectedFalseNoNode3")
		want("nowhere", "SelectedFalseNoNode1")
	})
}

// TestLeavesBeforeConditionIsKnown checks an agent whose node leaves a policy before the agent has
// received the event of the condition that it has just written itself.
func TestLeavesBeforeConditionIsKnown(t *testing.T) {
	c := &Cluster{pace: usualPace}
	p := &v1alpha1.AccelerationPolicy{ObjectMeta: metav1.ObjectMeta{Name: "here", Generation: 1}}
	p.Spec.NodeSelector = map[string]string{"zone": "a"}
	m := &marking{left: time.Now()}
	if status, _, _, _ := c.verdict(p, m); status != metav1.ConditionFalse {
		t.Errorf("without a condition the verdict is %q, want False", status)
	}
	p.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionSelected, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonNodes, ObservedGeneration: 1, LastTransitionTime: metav1.NewTime(m.left.Add(-time.Second)),
	}}
	if status, reason, _, wait := c.verdict(p, m); status != metav1.ConditionUnknown || reason != v1alpha1.ReasonPending || wait < usualPace.patience {
		t.Errorf("with its own condition the verdict is %q %q after %s, want Unknown %s", status, reason, wait, v1alpha1.ReasonPending)
	}
	// The condition was written before the API server's clock was set back by an hour.
	p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(m.left.Add(time.Hour))
	if status, reason, _, wait := c.verdict(p, m); status != metav1.ConditionUnknown || reason != v1alpha1.ReasonPending || wait > usualPace.doubt {
		t.Errorf("with a condition of the future the verdict is %q %q after %s, want Unknown %s", status, reason, wait, v1alpha1.ReasonPending)
	}
}

// TestUninstalled checks that an agent that is stopped restores everything if its DaemonSet is
// deleted, and only then.
func TestUninstalled(t *testing.T) {
	for _, tt := range []struct {
		name   string
		do     func(*api)
		refuse int
		want   bool
	}{
		{"there", func(*api) {}, 0, false},
		{"gone", func(s *api) { s.remove(daemonPath) }, 0, true},
		{"being deleted", func(s *api) {
			d := daemonSet()
			d["metadata"].(object)["deletionTimestamp"] = "1999-01-01T00:00:00Z"
			s.put(daemonPath, d)
		}, 0, true},
		{"its namespace is being deleted", func(s *api) {
			n := namespace()
			n["metadata"].(object)["deletionTimestamp"] = "1999-01-01T00:00:00Z"
			s.put(namespacePath, n)
		}, 0, true},
		{"its namespace is gone", func(s *api) { s.remove(namespacePath) }, 0, true},
		{"without the right to ask", func(*api) {}, 403, true},
		{"no sensible answer", func(*api) {}, 500, false},
		{"no answer", (*api).kill, 0, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newAPI()
				s.put(nodePath, nodeObject(nil))
				s.put(daemonPath, daemonSet())
				s.put(namespacePath, namespace())
				c, desired := s.connect(t)
				next(t, desired)
				tt.do(s)
				s.setRefuse(func(string, string) int { return tt.refuse })
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				if got := c.Uninstalled(ctx); got != tt.want {
					t.Errorf("uninstalled: %v, want %v", got, tt.want)
				}
			})
		})
	}

	t.Run("after some time without an answer", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newAPI()
			s.put(nodePath, nodeObject(nil))
			c, desired := s.connect(t)
			next(t, desired)
			asked := 0
			s.setRefuse(func(_, path string) int {
				if path == daemonPath {
					if asked++; asked < 3 {
						return 500
					}
				}
				return 0
			})
			if !c.Uninstalled(t.Context()) {
				t.Error("not uninstalled, but its DaemonSet is gone")
			}
		})
	})
	t.Run("without the right to ask for its namespace", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newAPI()
			s.put(nodePath, nodeObject(nil))
			s.put(daemonPath, daemonSet())
			c, desired := s.connect(t)
			next(t, desired)
			s.setRefuse(func(_, path string) int { return map[bool]int{true: 403}[path == namespacePath] })
			if c.Uninstalled(t.Context()) {
				t.Error("uninstalled, but its DaemonSet is there")
			}
		})
	})

	t.Run("it deletes its NodeAcceleration", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newAPI()
			s.put(nodePath, nodeObject(nil))
			s.put(daemonPath, daemonSet())
			c, desired := s.connect(t)
			next(t, desired)
			c.Publish(agent.Status{Ready: true, Reason: v1alpha1.ReasonNoPolicy})
			eventually(t, "state object", func() string {
				if s.get(statePath) == nil {
					return "not there"
				}
				return ""
			})
			must(t, c.Forget(t.Context()))
			must(t, c.Forget(t.Context())) // it may be deleted already
			if o := s.get(statePath); o != nil {
				t.Errorf("%v is left", o)
			}
		})
	})
}
