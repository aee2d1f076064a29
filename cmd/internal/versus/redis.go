package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// tokenBucket is the bucket that a Redis user would write: atomic, integers,
// refilled by the server's microseconds, and without a write when it refuses.
// KEYS[1] is the tenant's hash: m, millionths of a unit left, and t, when that
// was, in microseconds. ARGV: units/s, burst, cost. It remembers no attempts:
// a caller that repeats a lost request is charged twice.
const tokenBucket = `
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local rate, full, cost = tonumber(ARGV[1]), ARGV[2] * 1000000, ARGV[3] * 1000000
local held = redis.call('HMGET', KEYS[1], 'm', 't')
local left = full
if held[1] then
  left = math.min(full, held[1] + math.max(0, now - held[2]) * rate)
end
if left < cost then
  return 0
end
redis.call('HSET', KEYS[1], 'm', string.format('%.0f', left - cost), 't', string.format('%.0f', now))
return 1
`

// redisServer is a Redis that answers after its log is synced.
type redisServer struct {
	*child
	client *redis.Client
	sha    string
	dir    string
}

func startRedis(ctx context.Context, r *run) (*redisServer, error) {
	program, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, missingError("redis-server is not installed (Debian: apt-get install redis-server)")
	}
	s := &redisServer{dir: filepath.Join(r.dir, "redis")}
	if err := os.Mkdir(s.dir, 0o700); err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	if s.child, err = start(ctx, program, "--bind", "127.0.0.1", "--port", strconv.Itoa(port), "--dir", s.dir,
		"--save", "", "--appendonly", "yes", "--appendfsync", "always"); err != nil {
		return nil, err
	}
	s.client = redis.NewClient(&redis.Options{
		Addr: fmt.Sprintf("127.0.0.1:%d", port), PoolSize: r.Callers, MinIdleConns: r.Callers,
		ReadTimeout: 10 * time.Second, PoolTimeout: 10 * time.Second, DisableIdentity: true,
	})
	err = s.until(ctx, 20*time.Second, func(ctx context.Context) error { return s.client.Ping(ctx).Err() })
	if err == nil {
		s.sha, err = s.client.ScriptLoad(ctx, tokenBucket).Result()
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *redisServer) close() error { return errors.Join(s.client.Close(), s.stop()) }

// version is what the server calls itself.
func (s *redisServer) version(ctx context.Context) string {
	info, err := s.client.InfoMap(ctx, "server").Result()
	if err != nil {
		return err.Error()
	}
	return info["Server"]["redis_version"]
}

// decider asks the script. Each call takes a connection of its own out of a
// pool of as many as there are callers.
func (s *redisServer) decider() decide {
	return func(ctx context.Context, _ int, tenant string) error {
		n, err := s.client.EvalSha(ctx, s.sha, []string{tenant}, bucketRate, bucketBurst, 1).Int()
		if err == nil && n != 1 {
			err = fmt.Errorf("redis refused %s", tenant)
		}
		return err
	}
}
