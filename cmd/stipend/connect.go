package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/stipend/stipend/proto/grant"
)

// connection is how the authority is reached.
type connection struct {
	target  string
	tls     bool
	ca      string
	cert    string
	key     string
	name    string
	timeout durationFlag
}

const defaultAuthority = "127.0.0.1:7400"

func (c *connection) register(fs *pflag.FlagSet) {
	c.timeout = durationFlag(10 * time.Second)
	target := os.Getenv("STIPEND_AUTHORITY")
	if target == "" {
		target = defaultAuthority
	}
	fs.StringVar(&c.target, "authority", target, "`address` of the authority (environment STIPEND_AUTHORITY)")
	fs.BoolVar(&c.tls, "tls", false, "use TLS, with the roots of the system")
	fs.StringVar(&c.ca, "tls-ca", "", "use TLS, with the roots of this PEM `file`")
	fs.StringVar(&c.cert, "tls-cert", "", "client certificate, a PEM `file`; with --tls-key")
	fs.StringVar(&c.key, "tls-key", "", "its key, a PEM `file`")
	fs.StringVar(&c.name, "tls-server-name", "", "name that the authority's certificate must bear")
	fs.Var(&c.timeout, "timeout", "longest time for the whole command")
}

func (c *connection) credentials() (credentials.TransportCredentials, error) {
	if !c.tls && c.ca == "" && c.cert == "" && c.key == "" && c.name == "" {
		return insecure.NewCredentials(), nil
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: c.name}
	if c.ca != "" {
		pem, err := os.ReadFile(c.ca)
		if err != nil {
			return nil, badInputf("--tls-ca: %w", err)
		}
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(pem) {
			return nil, badInputf("--tls-ca: %s holds no PEM certificate", c.ca)
		}
	}
	if (c.cert == "") != (c.key == "") {
		return nil, badInputf("--tls-cert and --tls-key belong together; give both or none")
	}
	if c.cert != "" {
		pair, err := tls.LoadX509KeyPair(c.cert, c.key)
		if err != nil {
			return nil, badInputf("--tls-cert: %w", err)
		}
		t.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(t), nil
}

// call connects, runs do within the timeout and turns its error into one that
// says what to do next.
func (c *connection) call(ctx context.Context, do func(context.Context, *grpc.ClientConn) error) error {
	if c.timeout <= 0 {
		return badInputf("--timeout: 0s; allowed: more than that")
	}
	creds, err := c.credentials()
	if err != nil {
		return err
	}
	if _, _, err := net.SplitHostPort(c.target); err != nil && !strings.Contains(c.target, ":") {
		return badInputf("--authority: %q has no port; write host:port, as in %s", c.target, defaultAuthority)
	}
	conn, err := grpc.NewClient(c.target, grpc.WithTransportCredentials(creds))
	if err != nil {
		return badInputf("--authority %s: %w", c.target, err)
	}
	defer conn.Close()
	limited, cancel := context.WithTimeout(ctx, time.Duration(c.timeout))
	defer cancel()
	if err = do(limited, conn); err != nil && ctx.Err() != nil {
		return interrupted("")
	}
	return c.explain(err)
}

// explain turns the status of a call into what a person can act on.
func (c *connection) explain(err error) error {
	var done *exit
	if err == nil || errors.As(err, &done) {
		return err
	}
	s, ok := status.FromError(err)
	if !ok {
		return failed(err)
	}
	reason, faults := details(s)
	switch {
	case reason == grant.UnknownTenant.String():
		return failed(fmt.Errorf("%s; stipend policy list shows the tenants, stipend policy apply adds one", s.Message()))
	case reason == grant.VersionConflict.String():
		return failed(fmt.Errorf("%s: somebody changed it meanwhile; look at it with stipend policy get, then apply again with --expect-version of what you saw", s.Message()))
	case reason == grant.UnknownSession.String():
		return failed(fmt.Errorf("the authority does not know this incarnation (%s); stipend incarnation list shows those it knows", s.Message()))
	case reason == grant.Overloaded.String():
		return failed(fmt.Errorf("the authority at %s is overloaded (%s); it is alive: try again in a moment", c.target, s.Message()))
	}
	switch s.Code() {
	case codes.InvalidArgument:
		if len(faults) > 0 {
			return badInputf("the authority refuses it:\n  %s", strings.Join(faults, "\n  "))
		}
		return badInputf("the authority refuses it: %s", s.Message())
	case codes.Unavailable:
		if reason != "" {
			return failed(fmt.Errorf("the authority at %s does not serve now (%s); it starts or drains: try again in a few seconds, or look at its log", c.target, s.Message()))
		}
		return failed(fmt.Errorf("no authority answers at %s: %s\n  Is it running (stipend-authority)? Is the address right (--authority)? Does it want TLS (--tls-ca)?", c.target, lastPart(s.Message())))
	case codes.DeadlineExceeded:
		return failed(fmt.Errorf("no answer from %s within %s; a longer --timeout may help, the authority's log or metrics tell why", c.target, c.timeout.String()))
	case codes.Unimplemented:
		return failed(fmt.Errorf("%s answers, but not as an authority of this version: %s", c.target, s.Message()))
	case codes.Unauthenticated, codes.PermissionDenied:
		return failed(fmt.Errorf("the authority at %s wants other credentials: %s; see --tls-cert and --tls-key", c.target, s.Message()))
	}
	return failed(fmt.Errorf("authority at %s: %s (%s)", c.target, s.Message(), s.Code()))
}

// lastPart drops the outer layers of gRPC's connection errors.
func lastPart(s string) string {
	if i := strings.LastIndex(s, `desc = "`); i >= 0 {
		s = strings.TrimSuffix(s[i+len(`desc = "`):], `"`)
	}
	return s
}

func details(s *status.Status) (reason string, faults []string) {
	for _, d := range s.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			reason = d.Reason
		case *errdetails.BadRequest:
			for _, v := range d.FieldViolations {
				faults = append(faults, v.Field+": "+v.Description)
			}
		}
	}
	return reason, faults
}
