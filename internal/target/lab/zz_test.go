package lab
import ("testing";"time";"os";"path/filepath";"fmt";"runtime/pprof")
func TestZZ(t *testing.T) {
 for i:=0;i<25;i++ {
 for _, shape := range shapes {
  c := config(labName(t)); c.Pods, c.Shape, c.NIC.Offload = 32, shape, "none"
  tm := time.AfterFunc(700*time.Millisecond, func(){ ts,_:=filepath.Glob("/proc/self/task/*"); for _,x := range ts { b,_:=os.ReadFile(x+"/stack"); w,_:=os.ReadFile(x+"/wchan"); fmt.Println(x,string(w)); fmt.Println(string(b))}; pprof.Lookup("goroutine").WriteTo(os.Stdout,1)
   ks,_:=filepath.Glob("/proc/[0-9]*"); for _,k := range ks { s,_:=os.ReadFile(k+"/stat"); cm,_:=os.ReadFile(k+"/comm"); if len(s)>0 { b,_:=os.ReadFile(k+"/stack"); if string(cm)!="" && (len(b)>0 && (contains(string(b),"cleanup_net")||contains(string(b),"rtnl")||contains(string(b),"unregister")||contains(string(b),"synchronize"))) { fmt.Println(k,string(cm),string(b)) } } } })
  a:=time.Now()
  l, err := Up(t.Context(), c, Options{Dir: t.TempDir()}); if err != nil { t.Fatal(err) }
  tm.Stop()
  u := time.Since(a); a=time.Now()
  l.Down(t.Context())
  if u > 600*time.Millisecond || time.Since(a) > 600*time.Millisecond { fmt.Println(i,shape,u,time.Since(a)) }
 }}
}
func contains(a,b string) bool { for i:=0;i+len(b)<=len(a);i++ { if a[i:i+len(b)]==b {return true}}; return false }
