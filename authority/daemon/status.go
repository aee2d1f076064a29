package daemon

import (
	"errors"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stipend/stipend/proto/grant"
	"github.com/stipend/stipend/proto/wire"
)

// errorDomain is the domain of every google.rpc.ErrorInfo; its reasons are the
// texts of grant.Reason.
const errorDomain = "stipend"

// refuse makes a status with ErrorInfo and, if retry is positive, RetryInfo.
func refuse(code codes.Code, why grant.Reason, message string, retry time.Duration, more ...protoadapt.MessageV1) error {
	details := []protoadapt.MessageV1{&errdetails.ErrorInfo{Reason: why.String(), Domain: errorDomain}}
	if retry > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(retry)})
	}
	s := status.New(code, message)
	if with, err := s.WithDetails(append(details, more...)...); err == nil {
		s = with
	}
	return s.Err()
}

func faulty(why grant.Reason, message string) error {
	return refuse(codes.InvalidArgument, why, message, 0)
}

// badRequest names every faulty field in a google.rpc.BadRequest.
func badRequest(err error) error {
	var problems wire.Problems
	collect(err, &problems)
	return invalid(err.Error(), problems)
}

func invalid(message string, problems []grant.Problem) error {
	detail := &errdetails.BadRequest{}
	for _, p := range problems {
		detail.FieldViolations = append(detail.FieldViolations, &errdetails.BadRequest_FieldViolation{
			Field: p.Field, Description: p.Given + "; allowed: " + p.Allowed,
		})
	}
	return refuse(codes.InvalidArgument, grant.Invalid, message, 0, detail)
}

// collect walks joined errors; errors.As alone would stop at the first.
func collect(err error, into *wire.Problems) {
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, one := range many.Unwrap() {
			collect(one, into)
		}
		return
	}
	var p wire.Problems
	if errors.As(err, &p) {
		*into = append(*into, p...)
	}
}

// undecided is the status of a call that was not decided: nothing is said of
// its fate. Other reasons are not for it.
func undecided(why grant.Reason, retry time.Duration) error {
	switch why {
	case grant.Overloaded:
		return refuse(codes.ResourceExhausted, why, "the queue is full; the authority is alive", max(retry, 100*time.Millisecond))
	case grant.Deadline:
		return refuse(codes.DeadlineExceeded, why, "the time ran out before the call was decided; nothing was deducted", 0)
	}
	return refuse(codes.Unavailable, grant.Unavailable, "not decided; ask again with the same id", max(retry, 100*time.Millisecond))
}

func errDraining() error {
	return refuse(codes.Unavailable, grant.Unavailable, "the authority is not serving: it starts or drains", time.Second)
}

// reasonOf is the reason in a status made by refuse; empty: none.
func reasonOf(err error) string {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.Domain == errorDomain {
			return info.Reason
		}
	}
	return ""
}
